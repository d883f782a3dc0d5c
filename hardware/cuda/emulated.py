"""CUDA's attention on a CPU: its kernels are emulated."""

from hardware.cpu.platform import CpuPlatform
from hardware.cuda.platform import CudaAttention, CudaPlatform

NOT_COVERED = (
    "the precision of the device's arithmetic",
    "which device a tensor is on",
    "the order in which the device's streams run",
    "nccl",
    "vllm on a GPU (the rollout is vLLM on this CPU)",
)
"""Subjects that a passing check on the emulated kernels does not cover."""


class EmulatedCudaPlatform(CudaAttention, CpuPlatform):
    """CUDA's lowering and core attention on a CPU: the kernels are emulated, the rest is the CPU platform.

    fp32 stands for bf16, so that results can be compared with others to rounding.
    """

    name = "cuda-emulated"
    evidence = "emulated"
    not_covered = NOT_COVERED
    proven = "emulated"
    stand_in = "cuda-emulated"
    varlen_types = (*CudaPlatform.varlen_types, "float32")

    def find_state_kernel(self):
        return self.load("emulator.delta_rule").chunk_gated_delta_rule

    def init_process(self, local_rank: int):
        device = super().init_process(local_rank)
        self.load("emulator.operator").install()
        return device
