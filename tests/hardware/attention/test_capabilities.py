"""The capability table: complete, read by whoever lowers a rule, and true of every backend that runs here."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from support.attention import draw_qkv

from engines.megatron.layout import Layout
from hardware.attention import capabilities
from hardware.attention.capabilities import PLACES, TABLE, check_override, find_backend, name_place
from hardware.attention.dense.oracle import compute_visible, list_slots
from hardware.attention.mask_spec import MaskSpec
from hardware.attention.rules import CAUSAL, RULES, Rule
from hardware.cpu.platform import CpuPlatform
from hardware.npu.emulator.operator import install
from hardware.npu.kernel_call import build_triangle
from hardware.platforms import PLATFORMS, get_platform
from rlworker.checks.device.dense_attention import DIM, HEADS, dense_attention, find_image_blocks

RULE_OF = {
    "full": Rule(causal=False),
    "causal": CAUSAL,
    "window": Rule(window=3),
    "chunk": Rule(chunk=4),
    "images": Rule(images=True),
    "prefix": Rule(prefix=True),
    "state": Rule(state=True),
}
LENGTHS = (5, 1, 0, 12)
PLACES_OF = list(itertools.product(("bshd", "thd"), (False, True)))
MASKS = tuple(rule for rule in RULES if rule != "state")
EXECUTED = {("torch_sdpa", kind, cp, rule) for kind, cp in PLACES_OF for rule in MASKS}
EXECUTED |= {("torch_delta", kind, cp, "state") for kind, cp in PLACES_OF}
"""test_core_attention.py runs every rule through the platform's core attention, both layouts, with CP 1, 2 and 4, and
test_delta_rule.py states."""
NPU = {
    (f"npu_mode{mode}", kind, cp, rule)
    for mode, kind, cp, rules in (
        (1, "bshd", False, MASKS),
        (1, "thd", False, ("causal", "window", "chunk")),
        (1, "bshd", True, MASKS),
        (2, "bshd", False, ("causal",)),
        (2, "thd", False, ("causal",)),
        *((3, kind, cp, ("causal",)) for kind, cp in PLACES_OF),
        *((4, kind, cp, ("window",)) for kind, cp in PLACES_OF),
    )
    for rule in rules
}
"""What this file, and test_core_attention.py for those under context parallelism, run through the emulated operator."""
EMULATED = NPU | {("torch_varlen", kind, cp, rule) for kind, cp in PLACES_OF for rule in MASKS}
EMULATED |= {("fla_delta", kind, cp, "state") for kind, cp in PLACES_OF}
"""test_core_attention.py runs ``varlen_attn`` like SDPA, and test_delta_rule.py FLA's function like states in torch."""


def spec_of(kind: str, rule: Rule) -> MaskSpec:
    return Layout.build(LENGTHS, kind, multiple=4).build_mask_spec((rule,), find_image_blocks(LENGTHS), (2, 1, 0, 5))


def test_the_table_is_complete():
    backends = {backend for backend, *_ in TABLE}
    assert set(TABLE) == {(b, k, c, r) for b in backends for (k, c) in PLACES_OF for r in RULES}
    assert len(PLACES) == len(TABLE) == 28 * len(backends)
    assert backends == {name for each in PLATFORMS for name in get_platform(each).attention_backends}
    for place, cell in TABLE.items():
        assert cell.text, place
        assert bool(cell.nearest) != cell.honoured, f"{place}: what is refused names what works, and nothing else does"


@pytest.mark.parametrize(("evidence", "places"), [("executed", EXECUTED), ("emulated", EMULATED)])
def test_what_is_called_executed_or_emulated_is_what_tests_run(evidence, places):
    assert {place for place, cell in TABLE.items() if cell.evidence == evidence} == places


def test_what_a_refusal_points_to_is_honoured():
    """Where a refusal names backends of the table as nearest, one of them honours the rule in that layout or bshd."""
    names = {backend for backend, *_ in TABLE}
    for (_, kind, cp, rule), cell in TABLE.items():
        named = [word for word in cell.nearest.replace(",", " ").split() if word in names]
        places = [(b, k, c, rule) for b in named for k in (kind, "bshd", "thd") for c in (cp, False)]
        assert not named or any(TABLE[place].honoured for place in places), (kind, cp, rule, cell)


@pytest.mark.parametrize("cp", [False, True], ids=["no-cp", "cp"])
def test_the_document_says_what_the_table_says(cp):
    """docs/masks.md: b and t where a rule is honoured in bshd and in thd; under context parallelism with evidence."""
    page = (Path(__file__).parents[3] / "docs" / "masks.md").read_text()
    assert f" {len(RULES)} rules, {len(TABLE)} cells" in page
    without, _, with_cp = page.partition("\nWith context parallelism")
    for backend in {backend for backend, *_ in TABLE}:
        honoured = {(k, r) for k in ("bshd", "thd") for r in RULES if TABLE[backend, k, cp, r].honoured}
        cells = ["".join(k[0] for k in ("bshd", "thd") if (k, r) in honoured) or "·" for r in RULES]
        row = f"| {backend} | {' | '.join(cells)} |"
        if not cp:
            assert row in without
        elif honoured:
            (evidence,) = {TABLE[backend, kind, cp, rule].evidence for kind, rule in honoured}
            assert f"{row} {evidence}" in with_cp
        else:
            assert f"| {backend} |" not in with_cp


# -- the backends themselves


def test_varlen_attention_does_not_run_on_a_cpu():
    """But for the kernel that the emulator gives it, where it has been in this process."""
    from torch.nn.attention import varlen

    query = torch.zeros(4, HEADS, DIM, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with varlen._varlen_attn.set_kernel_enabled("cpu", False), pytest.raises((NotImplementedError, RuntimeError)):
        varlen.varlen_attn(query, query, query, bounds, bounds, 4, 4)


def npu_arguments(mode: int, spec, rule: Rule) -> dict:
    """What the cell's text says of a ``sparse_mode``, without the code that says it in production."""
    if mode in (2, 3):
        return dict(sparse_mode=mode, atten_mask=build_triangle())
    if mode == 4:
        return dict(sparse_mode=4, atten_mask=build_triangle(), pre_tockens=rule.window - 1, next_tockens=0)
    if spec.kind == "bshd":
        mask = ~compute_visible(spec)[:, None]
        mask[:, 0].diagonal(dim1=1, dim2=2).fill_(False)  # so that padding sees something: itself
        return dict(sparse_mode=mode, atten_mask=mask)
    position = torch.arange(max(spec.padded))
    distance = position[:, None] - position
    mask = distance < 0
    if rule.window:
        mask |= distance >= rule.window
    if rule.chunk:
        mask |= position[:, None] // rule.chunk != position // rule.chunk
    return dict(sparse_mode=mode, atten_mask=mask)


@pytest.mark.parametrize("place", sorted(place for place in NPU if not place[2]), ids=name_place)
def test_the_emulated_operator_honours_what_the_table_says(place):
    backend, kind, _, rule = place
    install()
    spec = spec_of(kind, RULE_OF[rule])
    see = compute_visible(spec)
    query, key, value = (x.detach() for x in draw_qkv(*see.shape[:2]))
    arguments = npu_arguments(int(backend[-1]), spec, RULE_OF[rule]) | dict(scale=DIM**-0.5)
    operator = torch.ops.npu.npu_fusion_attention
    if kind == "bshd":
        got = operator(query, key, value, HEADS, "BSND", **arguments)[0].flatten(2)
    else:
        ends = torch.tensor(spec.padded).cumsum(0).tolist()
        lengths = dict(actual_seq_qlen=ends, actual_seq_kvlen=ends)
        got = operator(query[0], key[0], value[0], HEADS, "TND", **arguments, **lengths)[0].flatten(1)[None]
    valid = list_slots(spec, 0)[0] >= 0
    assert torch.allclose(got[valid], dense_attention(query, key, value, see)[valid], atol=1e-6)


# -- who reads it


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_flipped_cell_is_refused_by_the_platform(monkeypatch, rule, kind, cp):
    place = ("torch_delta" if rule == "state" else "torch_sdpa", kind, cp > 1, rule)
    spec = Layout.build(LENGTHS, kind, cp=cp).build_mask_spec(
        (RULE_OF[rule],), find_image_blocks(LENGTHS), (2, 1, 0, 5)
    )
    rotary = tuple(torch.zeros(*list_slots(spec, 0)[0].shape, DIM) for _ in range(2))
    CpuPlatform().build_attention_inputs(spec, rotary)
    refused = dataclasses.replace(TABLE[place], honoured=False, text="it was flipped", nearest="another")
    monkeypatch.setitem(capabilities.TABLE, place, refused)
    with pytest.raises(ValueError, match=f"{name_place(place)} is refused: it was flipped"):
        CpuPlatform().build_attention_inputs(spec, rotary)
    CpuPlatform().build_attention_inputs(spec, rotary, override=(name_place(place),))


def test_the_first_backend_that_honours_a_rule_is_taken():
    backends = get_platform("npu").attention_backends
    assert find_backend(backends, "bshd", 1, CAUSAL)[0] == "npu_mode2"
    assert find_backend(backends, "thd", 2, CAUSAL)[0] == "npu_mode3"
    assert find_backend(backends, "thd", 1, Rule(window=4))[0] == "npu_mode4"
    assert find_backend(backends, "bshd", 1, Rule(images=True))[0] == "npu_mode1"


@pytest.mark.parametrize("rule", [Rule(images=True), Rule(window=4, images=True)])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_refusal_is_short_and_names_the_option_that_mends_it(rule, cp):
    backends = get_platform("npu").attention_backends
    with pytest.raises(
        ValueError, match=r"; set --actor.layout bshd, in which npu_mode1 does\. .* npu_mode1/thd/"
    ) as error:
        find_backend(backends, "thd", cp, rule)
    assert len(str(error.value)) < 320, "the reason of one backend, and not of each"
    assert find_backend(backends, "bshd", cp, rule)[0] == "npu_mode1"
    with pytest.raises(ValueError, match="nor does one in another layout; take another platform or another model"):
        find_backend(("torch_delta",), "thd", cp, rule)


def test_rules_told_by_different_means_do_not_add_up():
    """The NPU's mode 4 takes a window as two numbers, and no mask that would say both an image and a window."""
    both = Rule(window=4, images=True)
    assert find_backend(("torch_sdpa",), "thd", 1, both)[0] == "torch_sdpa"
    with pytest.raises(ValueError, match=r"rule window\(4\)\+images in bshd .*npu_mode4/bshd/no-cp/images is refused"):
        find_backend(("npu_mode4",), "bshd", 1, both)
    with pytest.raises(ValueError, match="honours window each alone, and not together"):
        find_backend(("npu_mode4",), "bshd", 1, both, override=("npu_mode4/bshd/no-cp/images",))


def test_an_override_must_name_a_refused_cell():
    check_override(("npu_mode4/thd/cp/causal",))
    with pytest.raises(ValueError, match="'npu_mode4/window' names no cell"):
        check_override(("npu_mode4/window",))
    with pytest.raises(ValueError, match="works without an override"):
        check_override(("torch_sdpa/thd/no-cp/causal",))


@pytest.mark.parametrize(
    "place", ["torch_sdpa/thd/no-cp/state", "npu_mode1/bshd/cp/state", "torch_delta/thd/cp/causal"]
)
def test_an_override_that_would_do_nothing_is_refused(place):
    """Layers with a state go to no backend of attention, whatever an override says, and masks to none of states."""
    with pytest.raises(ValueError, match=f"override of '{place}' does nothing: .*; leave it out .* nearest: "):
        check_override((place,))
