"""vLLM's CPU worker with exact logprobs and a backend's attention, chosen in the process that builds the model.

With tensor parallelism each worker is a process, which gets nothing but the name of a class. An engine's process may
later build a model of another kind, so each worker first undoes the patches of the others. No class inherits from
another: vLLM mixes its extension into a worker's class and refuses a class that has it already.
"""

from importlib import import_module
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from hardware.cpu.exact_logprobs import ExactSampler

WeightTransferEngineFactory.register_engine("gloo", "hardware.cpu.weight_transfer", "GlooWeightTransferEngine")
_REPLACED_LAYER = "QwenGatedDeltaNetAttention"
"""vLLM's layer with a state, by the name under which its registry has one in its place."""


def _load(part: str) -> Any:
    """Import a module of this package: a model loads nothing of what other models need."""
    return import_module(f"{__package__}.{part}")


class RecordsRoutes:
    """Methods of a worker that records routes."""

    model_runner: Any

    def record_routes(self, layers: int, chosen: int) -> None:
        """Record from now on, as ``RouteRecorder``."""
        self._routes = _load("routes").install(self.model_runner, layers, chosen)

    def take_routes(self, names: list[str]) -> dict[tuple[str, int], np.ndarray]:
        """Return and forget the experts of the samples of some requests, as ``RouteRecorder.take``."""
        return self._routes.take(names)


class PlainWorker(RecordsRoutes, CPUWorker):
    """vLLM's CPU worker with exact logprobs and vLLM's own attention."""

    def init_device(self) -> None:
        _undo_patches()
        _install_experts(self)
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)


class ImageRuleWorker(RecordsRoutes, CPUWorker):
    """Lets the tokens of an image see each other."""

    def init_device(self) -> None:
        _undo_patches()
        _load("image_rule").install()
        _install_experts(self)
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)


class StateRuleWorker(RecordsRoutes, CPUWorker):
    """Computes layers with a state in any dtype."""

    def init_device(self) -> None:
        _undo_patches()
        _load("state_rule").install()
        _install_experts(self)
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)


def _undo_patches() -> None:
    """Undo the patches of an engine that this process had before."""
    selector._cached_get_attn_backend.cache_clear()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    op_registry_oot.pop(_REPLACED_LAYER, None)


def _install_experts(worker: CPUWorker) -> None:
    if worker.parallel_config.enable_expert_parallel:
        _load("rollout_experts").install()
