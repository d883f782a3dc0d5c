"""Mask faults that verl had on NPUs: each is caught by the emulated operator, or cannot be written here."""

import pytest
import torch
from support.attention import draw_qkv

from engines.megatron.layout import Layout
from hardware.attention.contract import RefusedError, SilentError
from hardware.attention.rules import CAUSAL
from hardware.npu.emulator.operator import install
from hardware.platforms import get_platform
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS, dense_attention

LENGTHS = (5, 2, 7)


@pytest.fixture(scope="module")
def platform():
    install()
    return get_platform("npu-emulated")


def attend(query, key, value, **arguments):
    """The operator over rows ``[b, s, h, d]``."""
    arguments = dict(scale=DIM**-0.5) | arguments
    return torch.ops.npu.npu_fusion_attention(query, key, value, HEADS, "BSND", **arguments)[0].flatten(2)


def lowered(platform, layout):
    rotary = (torch.zeros(1, *layout.shape, DIM),) * 2
    return platform.build_attention_inputs(layout.build_mask_spec(), rotary)


def one_mask_for_everything(layout) -> torch.Tensor:
    """verl's ``[b, 1, s, s]``: real queries, real keys, causal; the rest blocked, rows of padding altogether."""
    pairs = layout.valid[:, :, None] & layout.valid[:, None, :]
    return ~(pairs & torch.ones(pairs.shape[1:], dtype=torch.bool).tril())[:, None]


@pytest.mark.parametrize("cp", [1, 2])
def test_5878_the_mask_that_forward_receives_is_not_the_one_that_unpads(platform, cp):
    """verl#5878: the mask for unpadding became ``[b, 1, s, s]`` for the kernel, and unpadding failed; under context
    parallelism it was built anew for the whole sequence, which the kernel refuses for a rank's part."""
    layouts = [Layout.build(LENGTHS, "bshd", cp=cp, cp_rank=rank) for rank in range(cp)]
    query, key, value = draw_qkv(*layouts[0].shape)
    whole = one_mask_for_everything(Layout.build(LENGTHS, "bshd", multiple=8))
    if cp == 1:
        with pytest.raises(SilentError, match="rows that see nothing"):
            attend(query, key, value, atten_mask=one_mask_for_everything(layouts[0]), sparse_mode=1)
        with pytest.raises(RefusedError, match="mask shape"):
            attend(query, key, value, atten_mask=~layouts[0].valid, sparse_mode=1)
    else:
        with pytest.raises(RefusedError, match="mask shape"):
            attend(query, key, value, atten_mask=whole, sparse_mode=1)
    # Here forward receives no tensor of the batch's shape, and unpadding needs none of what it receives.
    flat = torch.arange(float(sum(LENGTHS)))
    for layout in layouts:
        inputs = lowered(platform, layout)
        assert inputs.attention_mask is None
        assert all(call.atten_mask.shape == (2048, 2048) for call in inputs.plan.calls[CAUSAL])
    assert torch.equal(sum(layout.unpack(layout.pack(flat)) for layout in layouts), flat)


def test_5904_no_mask_for_the_kernel_leaves_unpadding_what_it_needs(platform):
    """verl#5904: the mask became None for the kernel's sake, and unpadding, which took the same variable, fell over it;
    nor is None what the kernel calls causal."""
    layout = Layout.build(LENGTHS, "bshd")
    query, key, value = draw_qkv(*layout.shape)
    with pytest.raises(SilentError, match="without atten_mask everyone sees everyone"):
        attend(query, key, value, sparse_mode=2)
    full, causal = (
        attend(query, key, value),
        dense_attention(query, key, value, layout.build_mask_spec().compute_visible()),
    )
    assert float((full - causal)[layout.valid].abs().max()) > 0.1, "None alone is full attention"
    (call,) = lowered(platform, layout).plan.calls[CAUSAL]
    out = attend(query, key, value, atten_mask=call.atten_mask, sparse_mode=call.sparse_mode)
    assert torch.allclose(out[layout.valid], causal[layout.valid], atol=1e-6)
    assert torch.equal(layout.unpack(out), out[layout.valid]), "rows in order, real tokens alone"


@pytest.mark.parametrize("kind", ["bshd", "thd"])
def test_7055_a_mask_does_not_grow_with_the_sequence(platform, kind):
    """verl#7055: a causal mask of ``[s, s]`` in floats, made at every micro-batch, took the memory of the host."""
    masks = []
    for length in (16, 4096, 65536):
        layout = Layout.build((length, 3), kind)
        ((call,),) = lowered(platform, layout).plan.calls.values()
        masks.append(call.atten_mask)
    assert {mask.dtype for mask in masks} == {torch.bool} and masks[0].numel() == 2048**2
    assert len({mask.data_ptr() for mask in masks}) == 1, "made once, whatever is attended"


def test_7372_a_pack_knows_its_padding_though_forward_receives_none(platform):
    """verl#7372: in TND the mask was None for models with images, and whoever asked it what is padding was told that
    nothing is; before, the padded form went to the kernel, which takes no such mask in a pack."""
    layout = Layout.build(LENGTHS, "thd", multiple=4)
    tokens = layout.shape[1]
    query, key, value = (torch.randn(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def pack(**arguments):
        return torch.ops.npu.npu_fusion_attention(
            query, key, value, HEADS, "TND", **dict(scale=DIM**-0.5, sparse_mode=2) | arguments
        )[0]

    (call,) = lowered(platform, layout).plan.calls[CAUSAL]
    ends = dict(actual_seq_qlen=call.actual_seq_qlen, actual_seq_kvlen=call.actual_seq_kvlen)
    with pytest.raises(RefusedError, match="mask shape"):
        pack(**ends, atten_mask=~Layout.build(LENGTHS, "bshd").valid, sparse_mode=1)
    real = torch.tensor(LENGTHS).cumsum(0).tolist()  # without the padding, which would be left to nobody
    with pytest.raises(SilentError, match="a tail that no sequence covers"):
        pack(atten_mask=call.atten_mask, actual_seq_qlen=real, actual_seq_kvlen=real)
    out = pack(**ends, atten_mask=call.atten_mask)
    key[~layout.valid[0]] = value[~layout.valid[0]] = 1e3
    louder = pack(**ends, atten_mask=call.atten_mask)
    assert torch.equal(out[layout.valid[0]], louder[layout.valid[0]]), "no real token sees padding"
    assert layout.unpack(out[None]).isfinite().all() and bool((~layout.valid).any())
