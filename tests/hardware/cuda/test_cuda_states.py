"""The emulated ``chunk_gated_delta_rule`` of FLA: its contract and its arithmetic; where CUDA takes FLA."""

import importlib.metadata
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from support.attention import check_refusals, step_delta_rule

from engines.megatron.layout import Layout
from hardware.attention import capabilities
from hardware.attention.capabilities import TABLE, name_place
from hardware.attention.contract import NotEmulatedError, SilentError
from hardware.attention.delta_rule import DeltaPlan
from hardware.attention.mask_spec import Sharing
from hardware.attention.rules import CAUSAL, Rule
from hardware.cuda.delta_rule import FlaPlan, build_plan, find_kernel
from hardware.cuda.emulator.delta_rule import MAX_KEY, REQUIREMENTS, chunk_gated_delta_rule
from hardware.platforms import get_platform

LENGTHS, GROUPS, RATIO, KEY, VALUE = (3, 5), 2, 2, 8, 4
HEADS = GROUPS * RATIO


def draw(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_call(tokens: int = sum(LENGTHS), **changes) -> dict:
    """Arguments of two sequences, with states to go on from."""
    arguments = {
        "q": draw(1, tokens, GROUPS, KEY),
        "k": draw(1, tokens, GROUPS, KEY).flip(1),
        "v": draw(1, tokens, HEADS, VALUE),
        "g": -draw(1, tokens, HEADS, dtype=torch.float32).sigmoid(),
        "beta": draw(1, tokens, HEADS, dtype=torch.float32).sigmoid().flip(1),
        "initial_state": draw(len(LENGTHS), HEADS, KEY, VALUE, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, 3, 8]),
        "cu_seqlens_cpu": torch.tensor([0, 3, 8]),
        "use_qk_l2norm_in_kernel": True,
        "stands_for_16_bits": None,
    }
    return arguments | changes


CALL = make_call()
EXAMPLES = {
    "rank": (dict(g=CALL["g"][0]), {}),
    "device": (dict(cu_seqlens=CALL["cu_seqlens"].to("meta")), {}),
    "one row": ({name: CALL[name].expand(2, *CALL[name].shape[1:]) for name in ("q", "k", "v", "g", "beta")}, {}),
    "key heads": (dict(q=CALL["q"][:, :, :1]), dict(q=CALL["q"][:, :, :1], k=CALL["k"][:, :, :1])),
    "grouped heads": (
        dict(q=draw(1, 8, 3, KEY), k=draw(1, 8, 3, KEY)),
        dict(q=draw(1, 8, 4, KEY), k=draw(1, 8, 4, KEY)),
    ),
    "key size": tuple(
        dict(q=draw(1, 8, GROUPS, size), k=draw(1, 8, GROUPS, size), initial_state=None)
        for size in (MAX_KEY + 1, MAX_KEY)
    ),
    "types alike": (dict(v=CALL["v"].half()), {name: CALL[name].half() for name in "qkv"}),
    "16 bits": (
        {name: CALL[name].float() for name in "qkv"},
        {name: CALL[name].float() for name in "qkv"} | {"stands_for_16_bits": torch.float32},
    ),
    "shapes alike": (dict(q=CALL["q"][:, :7]), {}),
    "gates of value heads": (dict(g=CALL["g"][..., :GROUPS]), {}),
    "bounds": (dict(cu_seqlens=CALL["cu_seqlens"].int()), {}),
    "bounds of the host": (dict(cu_seqlens_cpu=torch.tensor([0, 4, 8])), dict(cu_seqlens_cpu=None)),
    "every token covered": (dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"), torch.tensor([0, 3, 7])), {}),
    "bounds rise": (
        dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"), torch.tensor([0, 8, 8])),
        dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"), torch.tensor([0, 7, 8])),
    ),
    "a state each": (dict(initial_state=CALL["initial_state"][:1]), dict(initial_state=None)),
    "shape of states": (dict(initial_state=CALL["initial_state"].mT), {}),
    "type of states": (dict(initial_state=CALL["initial_state"].bfloat16()), {}),
}
"""Changes to ``make_call`` that break a requirement, and changes that keep it."""


def test_a_call_that_breaks_a_requirement_raises_and_one_that_keeps_it_does_not():
    check_refusals(REQUIREMENTS, EXAMPLES, lambda **changes: chunk_gated_delta_rule(**make_call(**changes))[0])


def test_what_fla_would_pass_over_is_refused():
    with pytest.raises(NotEmulatedError, match="rows without cu_seqlens"):
        chunk_gated_delta_rule(**make_call(cu_seqlens=None))
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        chunk_gated_delta_rule(**make_call(head_first=False))
    with pytest.raises(TypeError, match="positional"):
        chunk_gated_delta_rule(*(CALL[name] for name in ("q", "k", "v", "g", "beta")), None)  # pyright: ignore


def make_exact_call(**changes) -> dict:
    """The same call in fp32, which is to say what it returns to rounding."""
    call = make_call(output_final_state=True, stands_for_16_bits=torch.float32)
    return call | {name: call[name].float() for name in "qkv"} | changes


def split(call: dict, start: int, end: int) -> list[torch.Tensor]:
    """Arguments of ``step_delta_rule`` for a part of the tokens."""
    query, key, *others = (call[name][0, start:end].double() for name in ("q", "k", "v", "g", "beta"))
    return [query, key, *(x.unflatten(1, (GROUPS, RATIO)) for x in others)]


def test_states_begin_empty():
    out = chunk_gated_delta_rule(**(call := make_exact_call(initial_state=None)))[0][0]
    want = torch.cat([step_delta_rule(*split(call, start, end)) for start, end in ((0, 3), (3, 8))])
    assert torch.allclose(out.double(), want.flatten(1, 2), atol=1e-6)


def test_states_go_on_and_so_do_gradients():
    """Of a sequence in two calls, whose second begins with the states that the first returns."""
    bounds = dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"), torch.tensor([0, 8]))
    call = make_exact_call(**bounds, initial_state=None)
    tensors = {name: call[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    state, outs = None, []
    for start, end in ((0, 3), (3, 8)):
        part = {name: x[:, start:end] for name, x in tensors.items()} | {"initial_state": state}
        out, state = chunk_gated_delta_rule(**call | part | dict.fromkeys(bounds, torch.tensor([0, end - start])))
        outs.append(out[0])
    want = step_delta_rule(*split(call, 0, 8)).flatten(1, 2)
    probe = draw(*want.shape, dtype=torch.float32)
    for got, expected in zip(
        (torch.cat(outs), *torch.autograd.grad((torch.cat(outs) * probe).sum(), list(tensors.values()))),
        (want, *torch.autograd.grad((want * probe).sum(), list(tensors.values()))),
        strict=True,
    ):
        assert torch.allclose(got.double(), expected.double(), atol=2e-6)


def test_given_states_are_read():
    """By the first token, which decays them by half and adds nothing to them."""
    call = make_exact_call()
    call |= {"g": torch.full_like(call["g"], 0.5).log(), "beta": torch.zeros_like(call["beta"])}
    out, final = chunk_gated_delta_rule(**call)
    query = call["q"][0, [0, 3]].repeat_interleave(RATIO, 1)
    query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt() * KEY**-0.5
    read = torch.einsum("nhkv,nhk->nhv", call["initial_state"] / 2, query)
    assert torch.allclose(out[0, [0, 3]], read, atol=1e-6)
    assert torch.allclose(final, call["initial_state"] * torch.tensor([2.0**-3, 2.0**-5])[:, None, None, None])


def test_scale_and_lengths_of_queries_and_keys():
    call = make_exact_call()
    out = chunk_gated_delta_rule(**call)[0]
    unit = {name: call[name] / (call[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk"}
    plain = chunk_gated_delta_rule(**call | unit | {"use_qk_l2norm_in_kernel": False, "scale": 1.0})[0]
    assert torch.allclose(plain * KEY**-0.5, out, atol=1e-6)


# -- where it is taken


@pytest.fixture(autouse=True)
def found_anew():
    """A process looks for FLA once; here each test does."""
    find_kernel.cache_clear()
    yield
    find_kernel.cache_clear()


@pytest.fixture
def fla(monkeypatch):
    """FLA, as a package of this version; a dict of what its function was called with."""
    installed = {"version": "0.6.0", "calls": []}

    def note(*tensors, **arguments):
        installed["calls"].append(arguments)
        return chunk_gated_delta_rule(*tensors, **arguments, stands_for_16_bits=None)

    def tell(name):
        if name == "fla-core" and installed["version"]:
            return installed["version"]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", tell)
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", note, raising=False)
    return installed


STATES = Rule(state=True), CAUSAL


def plan_on(platform: str, dtype=torch.bfloat16, rules=STATES, head: int = 8) -> DeltaPlan | None:
    layout = Layout.build((5, 4, 9), "thd")
    rotary = (torch.zeros(1, *layout.shape, head, dtype=dtype),) * 2
    return get_platform(platform).build_attention_inputs(layout.build_mask_spec(rules), rotary).delta


@pytest.mark.parametrize("head", [8, 12], ids=["varlen_attn", "SDPA"])
def test_cuda_takes_fla_where_it_is_installed(fla, head):
    plan = plan_on("cuda", head=head)
    assert isinstance(plan, FlaPlan)
    assert isinstance(plan_on("cuda", torch.float16), FlaPlan)
    rows = draw(18, GROUPS * (2 * KEY + RATIO * VALUE + 2 * RATIO))
    query, key, value, decay, beta = (
        plan.cut(rows)[:, 3:].unflatten(-1, (GROUPS, -1)).split((KEY, KEY, RATIO * VALUE, RATIO, RATIO), dim=-1)
    )
    out = plan.apply_rule(query, key, value.unflatten(-1, (RATIO, VALUE)), -decay.sigmoid(), beta.sigmoid())
    (call,) = fla["calls"]
    assert call["cu_seqlens"].tolist() == call["cu_seqlens_cpu"].tolist() == [0, 8, 15, 24]
    assert plan.join(out).shape == (18, GROUPS, RATIO, VALUE) and out.dtype == torch.bfloat16


def test_a_plan_travels_and_its_bounds_stay_on_the_host_too(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    layout = Layout.build((9, 12, 4), "thd", sharing=Sharing((0, 0, 2), (0, 6, 0)))
    plan = build_plan(layout.build_mask_spec(), chunk_gated_delta_rule, "meta")
    moved = [plan.slots, plan.filled, plan.places, plan.calls[1].sources, *(call.bounds for call in plan.calls)]
    assert {x.device.type for x in moved} == {"meta"}
    assert [call.host_bounds.tolist() for call in plan.calls] == [[0, 9, 16], [0, 6, 12]]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": None},
        {"version": "0.5.1"},
        {"variable": "0"},
        {"dtype": torch.float32},
        {"deterministic": True},
        {"platform": "cpu"},
        {"platform": "npu"},
    ],
    ids=str,
)
def test_everywhere_else_torch_computes_states(fla, monkeypatch, changes):
    fla["version"] = changes.get("version", "0.6.0")
    monkeypatch.setenv("RLWORKER_FLA", changes.get("variable", ""))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: changes.get("deterministic", False))
    plan = plan_on(changes.get("platform", "cuda"), changes.get("dtype", torch.bfloat16))
    assert type(plan) is DeltaPlan and not fla["calls"]


def test_without_fla_nothing_of_it_is_loaded(monkeypatch):
    """As it is installed here: not at all."""
    assert type(plan_on("cuda")) is DeltaPlan and "fla" not in sys.modules
    assert plan_on("cuda", rules=(CAUSAL,)) is None and plan_on("cuda-emulated", rules=(CAUSAL,)) is None


def test_the_emulated_platform_takes_its_emulator():
    plans = [plan_on("cuda-emulated", dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert all(isinstance(plan, FlaPlan) and plan.kernel is chunk_gated_delta_rule for plan in plans)
    with pytest.raises(SilentError, match="16 bits"):
        chunk_gated_delta_rule(**make_call(q=CALL["q"].double(), k=CALL["k"].double(), v=CALL["v"].double()))


def test_a_flipped_cell_is_refused(monkeypatch):
    place = ("fla_delta", "thd", False, "state")
    refused = replace(TABLE[place], honoured=False, text="it was flipped", nearest="torch_delta")
    monkeypatch.setitem(capabilities.TABLE, place, refused)
    with pytest.raises(ValueError, match=f"{name_place(place)} is refused: it was flipped"):
        plan_on("cuda-emulated")
