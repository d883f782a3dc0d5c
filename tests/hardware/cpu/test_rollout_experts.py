"""Experts of vLLM on a CPU, of which a device holds some: what its kernel makes of those of other devices."""

import multiprocessing
import signal
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.cover import in_runs

pytestmark = pytest.mark.large  # it imports vLLM
TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 9, 64, 32, 8, 3
WRONG = 77
"""Exit status of a process that computed other numbers."""


def compute(own: slice, is_ours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over a device's experts: by the kernel, as vLLM calls it or as we do, and by a loop."""
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
    kernel, found = object.__new__(CPUUnquantizedExperts), torch.empty(TOKENS, HIDDEN)
    kernel._use_zentorch = False
    kernel.quant_config = FusedMoEQuantConfig.make()
    apply = _leave_out_others(CPUUnquantizedExperts.apply) if is_ours else CPUUnquantizedExperts.apply
    one = (found, x, *packed, weights, numbers.int(), MoEActivation.SILU, EXPERTS, here)
    apply(kernel, *one, None, None, torch.empty(0), torch.empty(0), None, False)
    want = torch.zeros(TOKENS, HIDDEN)
    for token, k in ((token, k) for token in range(TOKENS) for k in range(CHOSEN)):
        number = int(numbers[token, k])
        if here[number] >= 0:
            gate, up = (gated[number] @ x[token]).chunk(2)
            want[token] += weights[token, k] * (down[number] @ (F.silu(gate) * up))
    return found, want


HALVES = slice(0, 4), slice(4, 8)


@pytest.mark.parametrize("own", HALVES, ids=["first", "second"])
def test_experts_of_other_devices_weigh_nothing(measured, own):
    ours, want = compute(own, is_ours=True)
    measured({"ours against a loop": float((ours - want).abs().max())})
    assert float((ours - want).abs().max()) <= 1e-6


def compute_theirs(own: slice) -> None:
    theirs, want = compute(own, is_ours=False)
    sys.exit(WRONG if float((theirs - want).abs().max()) > 0.1 else 0)


@pytest.mark.parametrize("own", in_runs(HALVES[1:], (), HALVES[:1]))
def test_vllms_own_way_is_wrong(own):
    """Its kernel reads behind the weights, which may end the process. Where it is right one day,
    hardware/cpu/rollout_experts.py can go."""
    process = multiprocessing.get_context("spawn").Process(target=compute_theirs, args=(own,))
    process.start()
    process.join()
    assert process.exitcode in (WRONG, -signal.SIGSEGV, -signal.SIGBUS)


def test_an_engine_that_holds_all_experts_computes_as_before():
    (theirs, want), (ours, _) = (compute(slice(0, EXPERTS), is_ours) for is_ours in (False, True))
    assert torch.equal(theirs, ours) and float((ours - want).abs().max()) <= 1e-6
