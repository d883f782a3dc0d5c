"""Every platform's lowering of a mask rule against dense attention under the oracle, through its core attention."""

import itertools
import re
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cover import matrix
from support.factors import LAYOUTS, PLATFORMS
from support.ranks.engines_cases import start_process

from engines.megatron.layout import Layout
from engines.probes.faults import collect_faults, mend, plant
from hardware.attention.faults import ATTENTION_FAULTS, SHARING_FAULTS
from hardware.attention.mask_spec import Sharing
from hardware.attention.rules import CAUSAL, Rule
from hardware.cuda.emulated import EmulatedCudaPlatform
from hardware.npu import attention_plan as npu_plan
from hardware.platforms import get_platform
from rlworker.checks.case import make_probe_case
from rlworker.checks.device.attention import LENGTHS, RULES, SHARED, compare_attention
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS, dense_attention, find_image_blocks
from rlworker.checks.trainer import RULES as PROBED_RULES


def attend_all_ranks(rank, world, name, lengths, kind, cp, rules, layer, slots, mode=None, sharing=None):
    """Differences of the output and of the gradients, as shares of their limits.

    Args:
        mode: of the NPU, for every rule.
    """
    platform, build_inputs = start_process(rank, name), None
    if mode is not None:
        build_inputs = lambda spec, turn: npu_plan.build_attention_inputs(spec, turn, dict.fromkeys(spec.rules, mode))  # noqa: E731
    distances = compare_attention(
        platform, lengths, kind, cp, rules, layer, slots, sharing=sharing, build_inputs=build_inputs
    )
    return [distance.share for distance in distances]


def honoured(platform: str, kind: str, cp: int, rule: Rule) -> bool:
    """What a platform's kernel computes. The CPU's and CUDA's take every rule.

    The NPU's takes any rule in bshd. In thd it takes a band, and without CP anything of the position alone.
    """
    if platform != "npu-emulated" or kind == "bshd" or rule in (CAUSAL, Rule(window=3)):
        return True
    return cp == 1 and rule == Rule(chunk=4)


@matrix(
    {"platform": PLATFORMS, "cp": (1, 2, 4), "rule": RULES, "lengths": LENGTHS, "kind": LAYOUTS},
    allowed=lambda case: honoured(case["platform"], case["kind"], case["cp"], case["rule"]),
    whole=True,
)
def test_attention_is_what_the_oracle_allows(one_rank, platform, cp, rule, lengths, kind):
    """All of them: a case takes milliseconds, and the capability table calls each of its cells executed."""
    shares = one_rank.run(attend_all_ranks, platform, lengths, kind, cp, (rule,), 1, 0)[0]
    assert np.max(shares) <= 1, shares


@matrix(
    {"platform": PLATFORMS, "cp": (1, 2, 4), "rule": RULES, "pack": SHARED, "slots": (0, 96)},
    allowed=lambda case: case["rule"].causal and honoured(case["platform"], "thd", case["cp"], case["rule"]),
    triples=True,
)
def test_shared_beginnings_are_seen_as_the_oracle_allows(one_rank, platform, cp, rule, pack, slots):
    """All but a mask on an NPU, which is refused of them."""
    lengths, sharing = pack
    case = attend_all_ranks, platform, lengths, "thd", cp, (rule,), 1, slots, None, sharing
    if platform == "npu-emulated" and rule.chunk:
        with pytest.raises(AssertionError, match="no mask of a pack whose sequences share a prompt"):
            one_rank.run(*case)
        return
    shares = one_rank.run(*case)[0]
    assert np.max(shares) <= 1, shares


FAULTY = {
    "whole-buffer causal": ("thd", CAUSAL),
    "boundaries off by one": ("thd", CAUSAL),
    "inverted polarity": ("bshd", Rule(images=True)),
    "None where None means full": ("bshd", CAUSAL),
    "window off by one": ("bshd", Rule(window=3)),
    "an image cut at the window": ("bshd", Rule(window=1, images=True)),
    "causal where the image rule was asked": ("bshd", Rule(images=True)),
    "padding seen": ("bshd", Rule(causal=False)),
    **dict.fromkeys(SHARING_FAULTS, ("thd", CAUSAL)),
}
"""A layout and a rule under which each planted fault shows."""


def attend_with_fault(fault, rank, world, name, *args):

    plant(SimpleNamespace(platform=start_process(rank, name)), fault)
    try:
        return attend_all_ranks(rank, world, name, *args)
    finally:
        mend(None)


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_planted_fault_is_a_fault_on_every_platform(one_rank, platform, fault):
    kind, rule = FAULTY[fault]
    case = platform, (5, 4, 6), kind, 1, (rule,), 1, 0
    if fault in SHARING_FAULTS:
        case = platform, (12, 15, 14, 9), kind, 1, (rule,), 1, 0, None, Sharing((0, 0, 0, 3), (0, 9, 9, 0))
    wrong, right = (one_rank.run(run, *case)[0] for run in (partial(attend_with_fault, fault), attend_all_ranks))
    assert min(wrong) > 100 and np.max(right) <= 1, (wrong, right)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_a_planted_fault_is_a_wrong_mask_and_no_exception(platform, fault):
    """Under every rule that a check probes, with the sequences that it probes: what raises is not found by numbers."""
    backend, case = get_platform(platform), make_probe_case()
    with ExitStack() as planted:
        for owner, name, wrap in collect_faults(backend)[fault]:
            planted.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        for kind, rule in itertools.product(LAYOUTS, PROBED_RULES):
            if honoured(platform, kind, 1, rule):
                layout = Layout.build(case.lengths, kind, multiple=4)
                spec = layout.build_mask_spec((rule,), torch.tensor(case.image_block), case.prefixes)
                backend.build_attention_inputs(spec, (torch.zeros(1, *layout.shape, DIM),) * 2)


REFUSED = [case for case in itertools.product(LAYOUTS, (1, 2, 4), RULES) if not honoured("npu-emulated", *case)]


@pytest.mark.parametrize(("kind", "cp", "rule"), REFUSED, ids=str)
def test_an_npu_refuses_what_it_does_not_compute(kind, cp, rule):
    """Whatever the sequences: those of every case above."""
    for lengths in LENGTHS:
        layout = Layout.build(lengths, kind, cp=cp)
        spec = layout.build_mask_spec((rule,), find_image_blocks(lengths), tuple(min(2, n) for n in lengths))
        said = f"no backend honours the rule {re.escape(str(rule))} in {kind} with cp={cp}"
        with pytest.raises(ValueError, match=said):
            get_platform("npu-emulated").build_attention_inputs(spec, (torch.zeros(1, *layout.shape, DIM),) * 2)


@pytest.mark.parametrize("cp", [1, 2])
def test_an_npu_may_be_told_a_band_by_a_mask_too(one_rank, cp):
    for rule in (CAUSAL, Rule(window=3)):
        shares = one_rank.run(attend_all_ranks, "npu-emulated", LENGTHS[3], "bshd", cp, (rule,), 1, 0, 1)[0]
        assert np.max(shares) <= 1, shares


@pytest.mark.parametrize("cp", [1, 2])
def test_the_rest_of_a_pack_does_not_cost_its_square(cp):
    def list_calls(layout: Layout) -> list:
        inputs = layout.build_mask_spec(), (torch.zeros(1, *layout.shape, DIM),) * 2
        return get_platform("npu-emulated").build_attention_inputs(*inputs).plan.calls[CAUSAL]

    layout = Layout.build((100, 7), "thd", cp=cp, slots=8192)
    for call in list_calls(layout):
        queries, keys = (np.diff([0, *ends]) for ends in (call.actual_seq_qlen, call.actual_seq_kvlen))
        assert len(queries) == len(keys) == 2 + 81
        assert queries.max() <= 104 and sum(queries) == layout.shape[1] // (1 if cp == 1 else 2)
    (call,) = list_calls(Layout.build((2,) * 1000, "thd", slots=8192))
    assert len(call.actual_seq_qlen) == 1024 and call.actual_seq_qlen[-1] == 8192


@pytest.mark.parametrize(("rule", "cp"), [(Rule(images=True), 1), (Rule(causal=False), 1), (Rule(chunk=4), 2)], ids=str)
def test_an_override_that_no_call_can_follow_is_refused(rule, cp):
    layout = Layout.build((5, 9), "thd", cp=cp)
    override = (f"npu_mode1/thd/{'cp' if cp > 1 else 'no-cp'}/{rule.parts[0]}",)
    spec = layout.build_mask_spec((rule,), find_image_blocks((5, 9)))
    with pytest.raises(ValueError, match="leave the cell out of"):
        get_platform("npu-emulated").build_attention_inputs(spec, (torch.zeros(1, *layout.shape, DIM),) * 2, override)


@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_layer_has_its_rule_and_a_pack_may_be_of_a_fixed_size(one_rank, platform, kind, cp):
    rules = (CAUSAL, Rule(window=4), Rule(images=True))
    for layer, slots in itertools.product((1, 2, 3), (0, 64)):
        if platform != "npu-emulated" or kind == "bshd":
            args = (LENGTHS[0], kind, cp, rules, layer, slots)
        else:  # without the rule that a pack on an NPU cannot have
            args = (LENGTHS[0], kind, cp, rules[:2], min(layer, 2), slots)
        shares = one_rank.run(attend_all_ranks, platform, *args)[0]
        assert np.max(shares) <= 1, (layer, slots, shares)


def attend_by_sdpa(rank, world, *args):
    with patch.object(EmulatedCudaPlatform, "varlen_types", ()):
        return attend_all_ranks(rank, world, "cuda-emulated", *args)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2])
def test_cuda_attends_by_sdpa_what_its_kernel_does_not_take(one_rank, kind, cp):
    for rule in (CAUSAL, Rule(window=3, images=True)):
        shares = one_rank.run(attend_by_sdpa, LENGTHS[0], kind, cp, (rule,), 1, 0)[0]
        assert np.max(shares) <= 1, shares


def test_no_mask_is_as_large_as_the_pack():
    """Masks stay within a group's own length, whatever the number of tokens in the pack."""
    lengths = tuple(range(10, 60)) * 4
    groups = list_groups(Layout.build(lengths, "thd", cp=2), Rule(window=8))
    largest = max(mask.numel() for group in groups for mask in group.masks.values())
    assert largest <= 60 * 60 and sum(lengths) ** 2 > 100 * largest


def list_groups(layout: Layout, rule: Rule = CAUSAL) -> list:
    inputs = layout.build_mask_spec((rule,)), (torch.zeros(1, *layout.shape, DIM),) * 2
    return get_platform("cpu").build_attention_inputs(*inputs).plan.groups


def test_sequences_of_like_lengths_share_a_call():
    """Eight lengths an octave, the next of which each takes: the padding stays below an eighth."""
    groups = list_groups(Layout.build(tuple(range(1, 257)), "thd"))
    taken = [group.keys for group in groups for _ in range(group.rows)]
    assert sorted({group.keys for group in groups}) == [
        *range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16)
    ]  # fmt: skip
    assert all(length <= keys < length * 9 / 8 for length, keys in zip(range(1, 257), sorted(taken)))


@pytest.mark.parametrize(("cp", "groups"), [(1, [(3, 70)]), (2, [(2, 68), (1, 72)])])
def test_a_call_is_as_wide_as_its_longest_sequence(one_rank, cp, groups):
    """Over context-parallel ranks sequences of other lengths have other chunks, and a call of their own."""
    lengths = (65, 70, 68)
    assert [(group.rows, group.keys) for group in list_groups(Layout.build(lengths, "thd", cp=cp))] == groups
    for rule in (CAUSAL, Rule(window=3)):
        shares = one_rank.run(attend_all_ranks, "cpu", lengths, "thd", cp, (rule,), 1, 0)[0]
        assert np.max(shares) <= 1, shares


def test_a_dense_mask_or_bias_is_refused(one_rank):
    def call(rank, world):
        start_process(rank)

        from megatron.core.transformer import TransformerConfig

        from hardware.cpu.attention import CpuAttention

        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
        core = CpuAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
        x = torch.zeros(2, 1, 4, 8)
        try:
            core(x, x, x, torch.ones(1, 1, 2, 2, dtype=torch.bool), packed_seq_params=None)
        except ValueError as error:
            return str(error)

    assert "attention_mask and attention_bias must be None" in one_rank.run(call)[0]


def test_reference_attention_is_torch_own():
    """The book formula above against SDPA on a plain causal case."""
    q, k, v = torch.randn(1, 6, HEADS, DIM), torch.randn(1, 6, KV_HEADS, DIM), torch.randn(1, 6, KV_HEADS, DIM)
    see = torch.ones(6, 6, dtype=torch.bool).tril()[None]
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert torch.allclose(dense_attention(q, k, v, see), want.transpose(1, 2).flatten(2), atol=1e-6)
