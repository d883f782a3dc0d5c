"""The NPU's layers on a CPU: its operators are emulated."""

from hardware.cpu.platform import CpuPlatform
from hardware.npu.platform import NpuLayers

NOT_COVERED = (
    "pse",
    "sink",
    "dropout",
    "softmax_max and softmax_sum",
    "the precision of the device's arithmetic",
    "which device a tensor is on",
    "how Ascend 950 differs",
    "hccl",
    "vllm-ascend (the rollout is vLLM on this CPU)",
)
"""Subjects that a passing check on the emulated operators does not cover."""


class EmulatedNpuPlatform(NpuLayers, CpuPlatform):
    """The NPU's lowering and layers on a CPU: its operators are emulated, the rest is the CPU platform."""

    name = "npu-emulated"
    evidence = "emulated"
    not_covered = NOT_COVERED
    proven = "emulated"
    stand_in = "npu-emulated"

    def init_process(self, local_rank: int):
        device = super().init_process(local_rank)
        self.load("emulator.operator").install()
        return device
