"""The NPU platforms: Ascend through torch_npu, without MindSpeed or beside it; and the same path emulated on a CPU.

This module is read to check settings, so it imports torch, torch_npu and Megatron only where they are used.
"""

import os
from typing import ClassVar

from hardware.megatron.kernel_memory import KernelMemory
from hardware.npu.limits import MAX_PACK_SEQUENCES
from hardware.platform import Node, Platform
from hardware.vllm_versions import RETURNED_ROUTES


class NpuLayers(Platform):
    """Lowering, core attention and fused layers of an NPU, which the emulated platform shares."""

    room = "hardware.npu"
    attention_backends = ("npu_mode2", "npu_mode3", "npu_mode4", "npu_mode1", "torch_delta")
    max_pack_sequences = MAX_PACK_SEQUENCES

    def build_contract(self, device):
        return self.load("emulator.examples").build_contract(device)


class NpuPlatform(NpuLayers):
    """Runs Megatron-core over hccl in bf16 or fp32, with the NPU's attention, norms, SwiGLU and rotation."""

    name = "npu"
    evidence = "executed"
    proven = "untested"
    stand_in = "npu-emulated"
    node = Node(devices=16, device_gb=64)
    default_dtype = "bfloat16"
    dist_backend = "hccl"
    interface_variables = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    ray_options: ClassVar[dict] = {"num_cpus": 1, "resources": {"NPU": 1}}
    visible_devices = "ASCEND_RT_VISIBLE_DEVICES"
    can_sleep = True  # untested: vllm-ascend's documentation of sleep mode
    kernel_memory = KernelMemory(fuses_norms=True, fuses_swiglu=True, keeps_unrotated=True)  # arguments of *_backward
    shares_prompts = False
    repeats = False
    rollout_head_dims = (64, 128, 192, 256)  # untested: sizes of the models that vllm-ascend's documentation lists
    rollout_backends = ("vllm_ascend",)
    rollout_block_tokens = 128  # vllm-ascend 0.23, utils.refresh_block_size
    rollout_kv_cache_mb = 16 * 1024
    rollout_settings: ClassVar[dict] = {"enforce_eager": True}  # untested: vllm-ascend's graphs beside sleep mode

    @property
    def returns_routes(self) -> bool:
        return RETURNED_ROUTES.is_there

    def init_process(self, local_rank: int):
        return self.load("device").init_process()

    def wrap_forward(self, inputs):
        return self.load("mindspeed").pass_lengths(inputs)

    def get_train_env(self) -> dict[str, str]:
        # expandable_segments: micro-batches differ in length, and blocks of fixed sizes would be left in pieces.
        # Ranks read weights for minutes before their first collective, for which hccl waits two by default.
        return super().get_train_env() | {
            "HCCL_CONNECT_TIMEOUT": os.environ.get("HCCL_CONNECT_TIMEOUT", "1200"),
            "PYTORCH_NPU_ALLOC_CONF": os.environ.get("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
        }

    def get_deterministic_env(self) -> dict[str, str]:
        return {"HCCL_DETERMINISTIC": os.environ.get("HCCL_DETERMINISTIC", "true")}

    def build_profiler(self):
        import torch_npu  # pyright: ignore[reportMissingImports]  it is installed on an NPU's machine alone

        return torch_npu.profiler.profile()

    def get_rollout_env(self) -> dict[str, str]:
        # NZ: weights would be kept in another order than the one in which a sync writes them.
        return super().get_rollout_env() | {"VLLM_ASCEND_ENABLE_NZ": "0"}
