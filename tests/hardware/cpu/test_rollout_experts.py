"""Experts of vLLM on a CPU, of which a device holds some: what its kernel makes of those of other devices."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.large  # it imports vLLM
TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 9, 64, 32, 8, 3


def compute(own: slice) -> list[torch.Tensor]:
    """The sum over a device's experts: by the kernel as vLLM calls it, as we do, and by a loop."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from hardware.cpu.rollout_experts import _leave_out_others

    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    gated, down, x = draw(EXPERTS, 2 * WIDTH, HIDDEN) / 8, draw(EXPERTS, HIDDEN, WIDTH) / 8, draw(TOKENS, HIDDEN)
    weights, numbers = draw(TOKENS, EXPERTS).softmax(dim=-1).topk(CHOSEN)
    here = torch.full((EXPERTS,), -1, dtype=torch.int32)
    here[own] = torch.arange(len(here[own]), dtype=torch.int32)
    packed = [ops.cpu_prepack_moe_weight(part[own].contiguous(), "vec") for part in (gated, down)]
    kernel, found = object.__new__(CPUUnquantizedExperts), []
    kernel._use_zentorch = False
    kernel.quant_config = FusedMoEQuantConfig.make()
    for apply in (CPUUnquantizedExperts.apply, _leave_out_others(CPUUnquantizedExperts.apply)):
        found.append(torch.empty(TOKENS, HIDDEN))
        one = (found[-1], x, *packed, weights, numbers.int(), MoEActivation.SILU, EXPERTS, here)
        apply(kernel, *one, None, None, torch.empty(0), torch.empty(0), None, False)
    want = torch.zeros(TOKENS, HIDDEN)
    for token, k in ((token, k) for token in range(TOKENS) for k in range(CHOSEN)):
        number = int(numbers[token, k])
        if here[number] >= 0:
            gate, up = (gated[number] @ x[token]).chunk(2)
            want[token] += weights[token, k] * (down[number] @ (F.silu(gate) * up))
    return [*found, want]


@pytest.mark.parametrize("own", [slice(0, 4), slice(4, 8)], ids=["the first half", "the second half"])
def test_experts_of_other_devices_weigh_nothing(measured, own):
    """vLLM's own way is wrong; where it is right one day, hardware/cpu/rollout_experts.py can go."""
    theirs, ours, want = compute(own)
    measured({"ours against a loop": float((ours - want).abs().max())})
    assert float((ours - want).abs().max()) <= 1e-6
    assert float((theirs - want).abs().max()) > 0.1


def test_an_engine_that_holds_all_experts_computes_as_before():
    theirs, ours, want = compute(slice(0, 8))
    assert torch.equal(theirs, ours) and float((ours - want).abs().max()) <= 1e-6
