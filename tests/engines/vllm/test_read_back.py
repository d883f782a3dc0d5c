"""Experts that a CPU's kernel packed, read as they were before."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.large  # it imports vLLM
EXPERTS, HIDDEN = 3, 96


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "padded"), [(64, 64), (48, 64)])
def test_packed_experts_are_read_bit_for_bit(dtype, width, padded):
    """Of any width: vLLM pads it to a multiple of 32."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    from engines.vllm.read_back import _trace_packing, _unpack_expert

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(EXPERTS, *shape, generator=generator).to(dtype)  # noqa: E731
    gated, down, more = draw(2, width, HIDDEN), draw(HIDDEN, width), padded - width
    padded_gated = F.pad(gated, (0, 0, 0, more)).flatten(1, 2)
    for whole, full in ((gated.flatten(1, 2), padded_gated), (down, F.pad(down, (0, more)))):
        packed = cpu_prepack_moe_weight(full, "vec")
        assert not torch.equal(packed, full), "packing moves something"
        order = _trace_packing(packed[:1], "vec")
        found = [_unpack_expert(expert, order, (whole.shape[1], whole.shape[2])) for expert in packed]
        assert torch.equal(torch.stack(found), whole)
