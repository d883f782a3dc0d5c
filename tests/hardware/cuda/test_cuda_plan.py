"""The calls that CUDA's plan makes of a rule: who sees whom in them, and what they do not copy."""

import itertools
import re
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.ranks.engines_cases import start_process

from engines.megatron.layout import Layout
from hardware.attention import capabilities
from hardware.attention.dense.oracle import compute_visible, list_slots
from hardware.attention.grouped_sdpa import GroupedPlan, _sdpa
from hardware.attention.mask_spec import MaskSpec
from hardware.attention.rules import CAUSAL, Rule
from hardware.cuda.attention_plan import RuleCalls, VarlenCall, VarlenPlan
from hardware.cuda.emulated import EmulatedCudaPlatform
from hardware.cuda.kernel_call import Call
from hardware.cuda.platform import CudaPlatform
from rlworker.checks.device.attention import LENGTHS as EVERY_LENGTHS
from rlworker.checks.device.attention import RULES
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS, find_image_blocks

LENGTHS = [EVERY_LENGTHS[0], EVERY_LENGTHS[-1]]


def build_plan(spec: MaskSpec, layout: Layout, dtype=torch.bfloat16, platform=CudaPlatform, head: int = DIM):
    return platform().build_attention_inputs(spec, (torch.zeros(1, *layout.shape, head, dtype=dtype),) * 2).plan


def calls_of(lengths, kind, rule, cp=1, cp_rank=0, slots=0) -> tuple[MaskSpec, RuleCalls]:
    layout = Layout.build(lengths, kind, cp=cp, cp_rank=cp_rank, slots=slots)
    prefixes = tuple(min(2 + i, n) for i, n in enumerate(lengths))
    spec = layout.build_mask_spec((rule,), find_image_blocks(lengths), prefixes)
    return spec, build_plan(spec, layout).calls[rule]


def seen_in(call: VarlenCall, keys: int) -> torch.Tensor:
    """``[q, keys]``, whom each query of a call sees."""
    query, key = (torch.zeros(int(bounds[-1]), 1, DIM) for bounds in (call.cu_seq_q, call.cu_seq_k))
    told = Call(query, key, key, call.cu_seq_q, call.cu_seq_k, call.max_q, call.max_k, call.window_size)
    places = torch.arange(keys) if call.key_index is None else call.key_index
    assert len(places) == len(key) and (call.query_index is None or len(call.query_index) == len(query))
    see = torch.zeros(len(query), keys, dtype=torch.bool)
    for queries, own, allowed in told.list_groups():
        see[queries[:, :, None], places[own][:, None]] = allowed
    return see


def seen_by_slots(calls: RuleCalls, keys: int) -> torch.Tensor:
    see = seen_in(calls.base, keys)
    if calls.opened is not None:
        opened = seen_in(calls.opened, keys)
        see[calls.slots] = opened if calls.rows is None else opened[calls.rows]
    return see


def end_to_end(spec: MaskSpec, visible: torch.Tensor) -> torch.Tensor:
    """The oracle ``[b, s, cp * s]`` over slots and keys of rows that lie end to end."""
    if spec.kind == "thd":
        return visible[0]
    rows, slots = visible.shape[:2]
    whole = torch.zeros(rows, slots, spec.cp, rows, slots, dtype=torch.bool)
    for row in range(rows):
        whole[row, :, :, row] = visible[row].view(slots, spec.cp, slots)
    return whole.view(rows * slots, -1)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_slot_sees_what_the_oracle_says_and_nothing_else(rule):
    """In both layouts, on every context-parallel rank, and in a pack of a fixed size; a pair at a time."""
    packs = ((LENGTHS[0], "bshd", 0), (LENGTHS[0], "thd", 0), (LENGTHS[0], "thd", 80), (LENGTHS[1], "thd", 0))
    for (lengths, kind, slots), cp in itertools.product(packs, (1, 2, 4)):
        for rank in range(cp):
            spec, calls = calls_of(lengths, kind, rule, cp, rank, slots)
            want = end_to_end(spec, compute_visible(spec))
            got, valid = seen_by_slots(calls, want.shape[1]), (list_slots(spec, rank)[0] >= 0).flatten()
            assert torch.equal(got[valid], want[valid]), (lengths, kind, cp, rank, slots)
            assert got.any(-1).all(), "padding sees something too: nothing else would be written to its slots"


@pytest.mark.parametrize("rule", [CAUSAL, Rule(window=3), Rule(chunk=4)], ids=str)
def test_a_pack_of_one_rank_is_told_as_it_lies(rule):
    spec, calls = calls_of(LENGTHS[1], "thd", rule)
    assert calls.opened is None and calls.base.query_index is None and calls.base.key_index is None
    assert calls.base.cu_seq_k is calls.base.cu_seq_q and calls.base.cu_seq_q.dtype == torch.int32
    if rule.chunk is None:
        assert calls.base.cu_seq_q.tolist() == [0, *np.cumsum([n for n in spec.padded if n])]


def test_the_kernel_gets_the_very_tensors(one_rank):
    """Causal thd: queries, keys and values in the memory where they were, and the bounds of the plan."""

    def call(rank, world):
        start_process(rank, "cuda-emulated")

        from megatron.core.transformer import TransformerConfig
        from torch.nn.attention import varlen

        from hardware.cuda.attention import CudaAttention

        config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS)
        core = CudaAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
        fused = torch.randn(10, HEADS + 2 * KV_HEADS, DIM)  # as Megatron cuts them out of one product
        tensors = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
        _, calls = calls_of((3, 7), "thd", CAUSAL)
        with patch.object(varlen, "varlen_attn", wraps=varlen.varlen_attn) as kernel:
            core.attend(*tensors, VarlenPlan({CAUSAL: calls}), CAUSAL)
        (got,), bounds = [c.args[:3] for c in kernel.call_args_list], kernel.call_args.args[3:5]
        same = [a.data_ptr() == b.data_ptr() and a.stride() == b.stride() for a, b in zip(got, tensors)]
        return same, [x is calls.base.cu_seq_q for x in bounds]

    assert one_rank.run(call)[0] == ([True] * 3, [True] * 2)


def test_images_take_one_more_call_however_many_there_are():
    lengths = (40,) * 50
    layout = Layout.build(lengths, "thd", cp=2, cp_rank=1)
    blocks = torch.tensor([position // 3 if position % 3 else -1 for _ in lengths for position in range(40)])
    for rule in (Rule(images=True), Rule(images=True, window=5)):
        plan = build_plan(layout.build_mask_spec((rule,), blocks), layout)
        assert len(plan.calls[rule].opened.cu_seq_q) > 300


def test_copies_of_queries_stand_where_an_image_is_cut():
    """Under a window alone, which is counted from the last key: rank 1 has the first of the image's three tokens."""
    rules = Rule(images=True), Rule(images=True, window=3)
    plain, windowed = (calls_of((16,), "thd", rule, cp=4, cp_rank=1)[1] for rule in rules)
    assert (plain.rows, plain.opened.query_index.tolist()) == (None, [3])
    assert windowed.rows.tolist() == [0] and windowed.opened.query_index.tolist() == [3, 3, 3]
    assert plain.slots.tolist() == windowed.slots.tolist() == [3]


def test_an_image_in_two_places_is_refused():
    layout = Layout.build((5, 3), "thd")
    with pytest.raises(ValueError, match="tokens of an image are not adjacent"):
        build_plan(layout.build_mask_spec((Rule(images=True),), torch.tensor([0, 0, -1, 0, 0, 0, 0, 0])), layout)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_rest_of_a_pack_does_not_cost_its_square(cp):
    _, calls = calls_of((100, 7), "thd", CAUSAL, cp, slots=8192)
    assert calls.base.max_q <= 104 and int(calls.base.cu_seq_q[-1]) == 8192 // cp


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_the_kernel_may_hand_to_another_is_never_asked(rule):
    """The default window, for which torch 2.14 may take cuDNN's kernel."""
    _, calls = calls_of(LENGTHS[1], "thd", rule)
    assert all(call.window_size != (-1, -1) for call in (calls.base, calls.opened) if call)


@pytest.mark.parametrize(
    ("dtype", "head", "device", "emulated"),
    [
        (torch.bfloat16, 128, VarlenPlan, VarlenPlan),
        (torch.float16, 256, VarlenPlan, VarlenPlan),
        (torch.float32, 128, GroupedPlan, VarlenPlan),  # which stands for bf16
        (torch.bfloat16, 264, GroupedPlan, GroupedPlan),
        (torch.bfloat16, 20, GroupedPlan, GroupedPlan),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_goes_to_sdpa(dtype, head, device, emulated):
    layout = Layout.build((5, 3), "thd")
    for platform, plan in ((CudaPlatform, device), (EmulatedCudaPlatform, emulated)):
        assert type(build_plan(layout.build_mask_spec(), layout, dtype, platform, head)) is plan


class OnCuda(torch.Tensor):
    """A tensor of the CPU's that takes the way of one on a device."""

    is_cuda = True


def test_key_heads_that_are_repeated_stay_with_their_queries():
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)  # [b, h, s, d]
    of_device = _sdpa(query.as_subclass(OnCuda), key, value, None, 0.3)
    assert (of_device - _sdpa(query, key, value, None, 0.3)).abs().max() < 1e-5


def test_a_refused_cell_of_the_kernel_that_is_taken_is_told():
    layout = Layout.build((5, 3), "thd")
    for dtype, backend in ((torch.bfloat16, "torch_varlen"), (torch.float32, "torch_sdpa")):
        place = (backend, "thd", False, "causal")
        refused = patch.dict(capabilities.TABLE, {place: capabilities.Cell(False, "it was flipped", "another")})
        with refused, pytest.raises(ValueError, match=re.escape(f"{backend}/thd/no-cp/causal is refused")):
            build_plan(layout.build_mask_spec(), layout, dtype)
