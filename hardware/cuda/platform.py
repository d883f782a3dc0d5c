"""The CUDA platforms: NVIDIA over nccl with ``varlen_attn``; and the same path emulated on a CPU.

This module is read to check settings, so it imports torch and Megatron only where they are used.
"""

import os
from typing import ClassVar

from hardware.megatron.kernel_memory import KernelMemory
from hardware.platform import HOST, Node, Platform
from hardware.vllm_versions import RETURNED_ROUTES, SENDERS


class CudaAttention(Platform):
    """Lowering and core attention of CUDA, which the emulated platform shares."""

    room = "hardware.cuda"
    attention_backends = ("torch_varlen", "torch_sdpa", "fla_delta", "torch_delta")
    varlen_types: tuple[str, ...] = ("bfloat16", "float16")
    max_pack_sequences = None

    def find_state_kernel(self):
        """Return the function that computes the gated delta rule in 16 bits; None leaves it to torch.

        FLA tries its tilings against the clock. So another process may add up in another order, and where results are
        to repeat torch computes the rule.
        """
        import torch

        return None if torch.are_deterministic_algorithms_enabled() else self.load("delta_rule").find_kernel()

    def build_contract(self, device):
        return self.load("emulator.examples").build_contract(device)


class CudaPlatform(CudaAttention):
    """Runs Megatron-core over nccl, with ``varlen_attn`` in bf16 and fp16 and SDPA for all else."""

    name = "cuda"
    evidence = "executed"
    proven = "untested"
    stand_in = "cuda-emulated"
    node = Node(devices=8, device_gb=80)
    default_dtype = "bfloat16"
    dist_backend = "nccl"
    interface_variables = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    ray_options: ClassVar[dict] = {"num_cpus": 1, "num_gpus": 1}
    visible_devices = "CUDA_VISIBLE_DEVICES"
    can_sleep = True
    # torch's fused rms_norm; flash attention's backward expands dk and dv to all heads and sums dq in fp32.
    kernel_memory = KernelMemory(
        fuses_norms=True,
        expands_kv=True,
        query_gradient_bytes=4,
        slots_per_sequence=128,
        head_logits=2**27,
        frozen_logits=2**26,
    )
    shares_prompts = True
    repeats = False
    rollout_head_dims = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # untested: sizes of vllm's flash kernels
    rollout_backends = ("vllm_cuda",)
    rollout_block_tokens = 16  # vllm, config/cache
    rollout_kv_cache_mb = 16 * 1024
    rollout_settings: ClassVar[dict] = {}  # CUDA graphs, as vllm takes them; untested
    ways_from_all_ranks = ("ipc",)

    @property
    def returns_routes(self) -> bool:
        return RETURNED_ROUTES.is_there

    def init_process(self, local_rank: int):
        return self.load("device").init_process()

    def get_device_key(self) -> str | None:
        import torch

        return str(torch.cuda.get_device_properties(0).uuid)

    def get_train_env(self) -> dict[str, str]:
        # expandable_segments: micro-batches differ in length, and blocks of fixed sizes would be left in pieces. What
        # lies in such a segment may not be open to another process: a tensor that is to be, by a handle, is for
        # whoever hands it over to allocate elsewhere. vLLM's own allocator, by which an engine sleeps, refuses them.
        # One connection: a collective that is started before a product also runs before it, as Megatron counts on.
        return super().get_train_env() | {
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        }

    def get_deterministic_env(self) -> dict[str, str]:
        # cuBLAS repeats itself with a workspace of its own; NCCL sums in one order along a ring.
        names = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
        return {name: os.environ.get(name, value) for name, value in names.items()}

    def find_weight_ways(self, colocated):
        # A handle opens memory of the same device; nccl takes no two ranks on one. Both untested.
        return ("ipc" if colocated else "nccl", HOST) if SENDERS.is_there else (HOST,)

    def make_trainer_info(self, way, rank, world_size, address, chunk, largest):
        return self.load("weight_transfer").make_trainer_info(way, rank, world_size, address, chunk, largest)
