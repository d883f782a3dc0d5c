"""The CPU platform: gloo, and Megatron-core with attention and norms of our own.

This module is read to check settings, so it imports torch and Megatron only where they are used.
"""

import os
from pathlib import Path
from typing import ClassVar

from hardware.megatron.kernel_memory import KernelMemory
from hardware.platform import HOST, Platform, RolloutWorkerClass
from hardware.vllm_versions import CAUSAL_FLAGS, CPU_EXPERTS, SENDERS, TESTED

# Large tensors in huge pages: the first touch of a page costs more than the computation on it.
_MEMORY = {"THP_MEM_ALLOC_ENABLE": "1"}
_CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Linux's names of instructions for bfloat16: the first two on x86, the last on Arm."""
# Class of vLLM's worker for each backend, and the classes that build its attention's metadata, carry states and sample.
_ROLLOUT_WORKERS = {
    "vllm_cpu": ("PlainWorker", ("CPUAttentionMetadataBuilder", "ExactSampler")),
    "vllm_cpu_images": ("ImageRuleWorker", ("ImageRuleBuilder", "ExactSampler")),
    "vllm_cpu_states": (
        "StateRuleWorker",
        ("CPUAttentionMetadataBuilder", "GDNAttentionMetadataBuilder", "StateRuleLayer", "ExactSampler"),
    ),
}


class CpuPlatform(Platform):
    """Runs the real Megatron-core on CPU over gloo, in fp32 or bf16."""

    name = "cpu"
    room = "hardware.cpu"
    evidence = "executed"
    proven = "executed"
    stand_in = "cpu"
    node = None
    default_dtype = "float32"
    dist_backend = "gloo"
    interface_variables = ("GLOO_SOCKET_IFNAME",)
    ray_options: ClassVar[dict] = {"num_cpus": 1}
    visible_devices = None
    can_sleep = False  # vllm 0.32, v1/worker/cpu_worker: a warning, and nothing else
    attention_backends = ("torch_sdpa", "torch_delta")
    max_pack_sequences = None
    kernel_memory = KernelMemory(copies_output=True)
    shares_prompts = True
    repeats = True
    rollout_head_dims = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm 0.32, v1/attention/backends/cpu_attn
    rollout_backends = ("vllm_cpu", "vllm_cpu_images", "vllm_cpu_states")
    rollout_block_tokens = 32  # the least that vllm 0.32, v1/attention/backends/cpu_attn, takes
    rollout_settings: ClassVar[dict] = {
        "block_size": rollout_block_tokens,
        "enforce_eager": True,  # see TORCH_COMPILE_DISABLE
        "kv_transfer_config": {
            "kv_connector": "SharedPrompts",
            "kv_connector_module_path": "hardware.cpu.shared_prompts",
            # No engine takes anything. What vLLM does for one that does, to images above all, is left out so.
            "kv_role": "kv_producer",
        },
    }

    @property
    def records_routes(self) -> bool:
        return CPU_EXPERTS.is_there

    @property
    def rollout_kv_cache_mb(self) -> int:
        if not (gib := os.environ.get("VLLM_CPU_KVCACHE_SPACE") or "1").isdecimal():
            raise ValueError(f"platform: VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, got {gib!r}")
        return int(gib) * 1024

    def init_process(self, local_rank: int):
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        shims = self.load("shims", "hardware.megatron")
        shims.install(shims.CPU)
        return torch.device("cpu")

    def explain_slow(self, dtype: str) -> str:
        if dtype != "bfloat16" or not _CPU_INFO.is_file() or _BF16_FLAGS & {*_CPU_INFO.read_text().split()}:
            return ""
        return "this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16); steps have taken 15 times as long"

    def get_driver_env(self) -> dict[str, str]:
        return _MEMORY

    def get_train_env(self) -> dict[str, str]:
        # Ray gives an actor as many threads as it has CPUs, one, unless the user says otherwise.
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        return super().get_train_env() | _MEMORY | interface

    def get_rollout_env(self) -> dict[str, str]:
        # TORCH_COMPILE_DISABLE: building inductor kernels costs 15 s at the first request and gains nothing here.
        # nobind: vLLM would otherwise pin its threads to cores that the trainers use.
        return (
            super().get_rollout_env()
            | _MEMORY
            | {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": str(self.rollout_kv_cache_mb // 1024),
                "TORCH_COMPILE_DISABLE": "1",
            }
        )

    def check_vllm_features(self, backend, spreads_experts):
        if backend == "vllm_cpu_images" and not CAUSAL_FLAGS.is_there:
            raise ValueError(
                f"rollout: {CAUSAL_FLAGS.explain()}, and the model's images see themselves both ways; install one of "
                f"{', '.join(TESTED)} that has it, or take a model of causal images, such as Qwen's"
            )
        if spreads_experts and not CPU_EXPERTS.is_there:
            raise ValueError(
                f"rollout: {CPU_EXPERTS.explain()}, and its older experts compute wrong numbers where a device has "
                "some of them; leave enable_expert_parallel out of --rollout.vllm"
            )

    def find_rollout_worker(self, backend):
        name, parts = _ROLLOUT_WORKERS[backend]
        return RolloutWorkerClass(f"hardware.cpu.rollout_worker.{name}", parts)

    def find_weight_ways(self, colocated):
        return (HOST, "gloo") if SENDERS.is_there else (HOST,)

    def make_trainer_info(self, way, rank, world_size, address, chunk, largest):
        make_info = self.load("weight_transfer", CpuPlatform.room).GlooTrainerInitInfo
        return make_info(*address, world_size, rank=rank, packed_buffer_size_bytes=chunk)
