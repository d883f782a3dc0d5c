"""Three faults of the field: each is shown in a raw backend or in its contract, and then is right or refused here."""

import pytest
import torch
import torch.nn.functional as F
from support.attention import draw_qkv, probe_influence
from support.ranks.engines_cases import start_process
from torch.utils.checkpoint import checkpoint

from engines.megatron.layout import Layout
from hardware.attention.capabilities import TABLE, find_backend
from hardware.attention.mask_spec import to_additive_mask, to_blocking_mask
from hardware.attention.rules import CAUSAL, Rule
from hardware.cpu.platform import CpuPlatform
from rlworker.checks.device.dense_attention import DIM, dense_attention

LENGTHS = (5, 1, 7)


def sdpa(**how):
    def attend(query, key, value):
        rows = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*rows, **how, enable_gqa=True).transpose(1, 2).flatten(2)

    return attend


def no_turn(layout):
    return torch.ones(1, *layout.shape, DIM), torch.zeros(1, *layout.shape, DIM)


def through_platform(layout, rules=(CAUSAL,)):
    """Our core attention over a layout, as ``[b, s, h, d] -> [b, s, h * d]``. Call where shims are installed."""
    from types import SimpleNamespace

    from megatron.core.transformer import TransformerConfig

    from hardware.cpu.attention import CpuAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    core = CpuAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)))
    inputs = CpuPlatform().build_attention_inputs(layout.build_mask_spec(rules), no_turn(layout))

    def attend(query, key, value):
        if layout.kind == "bshd":
            rows = (x.transpose(0, 1) for x in (query, key, value))
            return core(*rows, None, packed_seq_params=inputs).transpose(0, 1)
        return core(query[0], key[0], value[0], None, packed_seq_params=inputs)[None]

    return attend


def run_here(one_rank, function):
    """A function in a process in which Megatron's shims are installed."""

    def call(rank, world):
        start_process(rank)
        return function()

    return one_rank.run(call)[0]


# -- verl 5878 and 5904: a 4-D mask that unpadding cannot read; None that is right in one place and full in another


def test_a_mask_for_attention_is_not_a_mask_for_unpadding():
    layout = Layout.build(LENGTHS, "bshd")
    hidden = layout.pack(torch.arange(sum(LENGTHS)).float()[:, None])
    attention_mask = to_blocking_mask(layout.build_mask_spec().compute_visible())[:, None]  # [b, 1, s, s]
    with pytest.raises(IndexError):
        hidden[attention_mask]
    assert hidden[layout.valid].flatten().tolist() == list(range(sum(LENGTHS)))
    assert layout.unpack(hidden).flatten().tolist() == list(range(sum(LENGTHS)))


def test_none_is_given_where_it_means_the_rule(one_rank):
    """``npu_fusion_attention`` without a mask is full attention: the table says so, and names what to give it."""
    layout = Layout.build(LENGTHS, "bshd")
    see = layout.build_mask_spec().compute_visible()
    valid = layout.valid
    leaks = probe_influence(sdpa(attn_mask=None, is_causal=False), *see.shape[:2]) & ~see & valid[:, :, None]
    assert leaks.any(), "None without is_causal sees the future and the padding"
    for mode in (1, 2, 3, 4):
        assert "mask None" not in TABLE[f"npu_mode{mode}", "bshd", False, "causal"].text.split(";")[0]
    name, (cell,) = find_backend(("npu_mode2", "npu_mode1"), "bshd", 1, CAUSAL)
    assert name == "npu_mode2" and "2048 x 2048 upper triangle" in cell.text

    def ours():
        return probe_influence(through_platform(Layout.build(LENGTHS, "bshd")), len(LENGTHS), max(LENGTHS))

    found = run_here(one_rank, ours)
    assert torch.equal(found & valid[:, :, None], see & valid[:, :, None])


# -- TransformerEngine pull request 818: True came to mean the opposite


def test_polarity():
    see = Layout.build((6,), "bshd").build_mask_spec().compute_visible()
    query, key, value = draw_qkv(1, 6)
    want = dense_attention(query, key, value, see)
    kept, blocked, added = see[:, None], to_blocking_mask(see)[:, None], to_additive_mask(see, torch.float32)[:, None]
    for mask in (kept, added):
        assert torch.allclose(sdpa(attn_mask=mask)(query, key, value), want, atol=1e-6)
    # The same bits in the other sense: only the future is seen, and the last row sees nothing at all.
    wrong = probe_influence(sdpa(attn_mask=blocked), 1, 6)
    assert (wrong & ~see).any() and not (wrong & see)[0, :-1].any()
    # Added as numbers, a bool mask hides nothing.
    unmasked = probe_influence(sdpa(attn_mask=kept.float()), 1, 6)
    assert unmasked.all()


def test_a_row_that_sees_nothing_does_not_become_an_average_in_silence():
    spec = Layout.build((2, 5), "bshd").build_mask_spec()
    see = spec.compute_visible()
    assert not see[0, 2:].any() and to_blocking_mask(see)[0, 2:].sum() == 0
    assert to_blocking_mask(see)[0, :2].tolist() == [[False] + [True] * 4, [False] * 2 + [True] * 3]
    assert torch.isfinite(to_additive_mask(see, torch.bfloat16)).all()


# -- torchtitan pull request 1776: masks are an argument of forward, one for each pipeline micro-batch


def test_each_micro_batch_keeps_its_mask_until_its_backward(one_rank):
    """Two forward passes before the first backward, with recomputation, as a pipeline runs them. A mask kept beside the
    model is that of the second micro-batch when the first is recomputed; one that travels as an argument is not."""

    def both():
        ours = [through_platform(Layout.build((7,), "bshd"), (Rule(window=window),)) for window in (2, 4)]
        data = [draw_qkv(1, 7, seed) for seed in (0, 1)]
        want = [torch.autograd.grad(attend(*x).sum(), x) for attend, x in zip(ours, data)]
        current = {}

        def of_the_model(query, key, value):
            return current["attend"](query, key, value)

        def one_forward_ahead(global_mask):
            outs = []
            for attend, x in zip(ours, data):
                current["attend"] = attend
                outs.append(checkpoint(of_the_model if global_mask else attend, *x, use_reentrant=False))
            return [torch.autograd.grad(out.sum(), x) for out, x in zip(outs, data)]

        return [
            [max(float((a - b).abs().max()) for a, b in zip(g, w)) for g, w in zip(one_forward_ahead(kept), want)]
            for kept in (True, False)
        ]

    kept_beside, as_argument = run_here(one_rank, both)
    assert kept_beside[0] > 1e-2 and kept_beside[1] == 0, "the first micro-batch is recomputed under another's mask"
    assert as_argument == [0, 0]
