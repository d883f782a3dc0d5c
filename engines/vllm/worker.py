"""Methods added to vLLM's worker: load new weights into the running model, and seed its sampler."""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from engines.vllm.read_back import ReadBack, Reading
from engines.weight_digest import DigestPlan, checksum
from engines.weight_sync import SharedBucket


class WeightSyncExtension:
    """Methods that ``worker_extension_cls`` mixes into vLLM's worker, on every platform."""

    model_runner: Any
    model_config: ModelConfig
    vllm_config: VllmConfig
    device: torch.device
    read_back: ReadBack | None = None
    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]
    _arrived: dict[str, int]
    kept_states: tuple[dict, list]  # of engines.probes.vllm

    def begin_sync(self) -> None:
        """Prepare the model to load new weights layer by layer, and drop the weights of an unfinished update."""
        with self._loading():
            initialize_layerwise_reload(self._drop_unfinished())

    def _drop_unfinished(self) -> torch.nn.Module:
        """Drop the weights of an unfinished update, on whichever way it came; returns the model."""
        model = self.model_runner.get_model()
        vars(model).pop("load_weights", None)
        self._weight_update_active = False  # vLLM's own mark
        _forget_packed_experts(model)
        _forget_half_update(model)
        return model

    def begin_transfer(self) -> None:
        """Begin an update by vLLM's weight transfer, as ``begin_sync`` does, and take checksums of all that comes."""
        model: Any = self._drop_unfinished()
        self._arrived, load = {}, model.load_weights

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
            weights = list(weights)
            self._arrived |= {name: checksum(tensor) for name, tensor in weights}
            load(weights)

        model.load_weights = load_weights
        with self._loading():
            self.start_weight_update()

    def attempt(self, method: str, *args: Any) -> str:
        """Call a method of this worker, of vLLM's or of these; returns the error, empty if none.

        An error that several workers raise would leave vLLM with answers that it takes for those of its next call.
        """
        try:
            getattr(self, method)(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def end_transfer(self, checksums: Mapping[str, int]) -> None:
        """End an update by vLLM's weight transfer, if all weights came as they were sent.

        Args:
            checksums: name of each tensor -> the sender's ``checksum``.

        Raises:
            ValueError: weights were damaged on the way, or did not come.
        """
        model, arrived = self.model_runner.get_model(), self._arrived
        if unlike := [name for name, value in checksums.items() if arrived.get(name) != value]:
            came, sent = arrived.get(unlike[0]), checksums[unlike[0]]
            raise ValueError(
                f"weight sync: {len(unlike)} of {len(checksums)} tensors from {unlike[0]!r} on have other checksums: "
                f"{came:x} came, expected {sent:x}; the weights were damaged on the way"
                if came is not None
                else f"weight sync: {unlike[0]!r} and {len(unlike) - 1} other tensors did not come"
            )
        vars(model).pop("load_weights")
        with self._loading():
            self.finish_weight_update()
        _repack_tied_heads(model)

    def take_shared_weights(self, bucket: SharedBucket) -> None:
        """Load this worker's part of the weights in a bucket that the engine's process shares."""
        self.take_weights(bucket.tensors())

    def take_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Load this worker's part of weights, given as HuggingFace names and full tensors."""
        with self._loading():
            self.model_runner.get_model().load_weights(iter(weights))

    def end_sync(self) -> None:
        """Process the new weights in place, as vLLM does after loading a model."""
        model = self.model_runner.get_model()
        with self._loading():
            finalize_layerwise_reload(model, self.model_config)
        _repack_tied_heads(model)

    def digest_weights(self, shapes: Mapping[str, tuple[int, ...]], tied: bool, plan: DigestPlan) -> list[Reading]:
        """Digest this worker's part of the weights, as its model computes with them.

        Args:
            shapes: HuggingFace name -> shape of every weight. tied: whether the embedding is the output layer too.
        """
        model = self.model_runner.get_model()
        with torch.no_grad(), self._loading():
            self.read_back = self.read_back or ReadBack(model, shapes, tied, plan.dtype)
            return self.read_back.digest(plan)

    def run_function(self, function: str, *args: Any) -> Any:
        """Call ``function(worker, *args)``, where ``function`` is ``module:function``."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self, *args)

    def list_parts(self) -> list[str]:
        """Return the names of the classes that build attention metadata, of layers with a state, and of the sampler."""
        groups = [group for groups in self.model_runner.attn_groups for group in groups]
        builders = sorted({type(group.get_metadata_builder()).__name__ for group in groups})
        modules = self.model_runner.get_model().modules()
        layers = sorted({type(module).__name__ for module in modules if isinstance(module, MambaBase)})
        return [*builders, *layers, type(self.model_runner.sampler).__name__]

    def seed_sampler(self, seed: int) -> None:
        """Seed the generator that samples tokens."""
        torch.manual_seed(seed)

    def break_ties(self) -> None:
        """Make ``top_k`` keep exactly k ids. vLLM keeps all that tie with the last, more than it reports."""
        draw = self.model_runner.sampler.topk_topp_sampler
        draw.forward = partial(_draw_from_top, draw.forward)

    @contextlib.contextmanager
    def _loading(self):
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            yield


def _draw_from_top(draw: Callable, logits: Tensor, generators: dict, k: Tensor | None, p: Tensor | None):
    """Draw as ``draw(logits, generators, k, p)`` of vLLM, from the ``k`` largest of each row of logits ``[b, v]``.

    Args:
        k: ``[b]``, v where a request keeps all ids.
    """
    if k is not None:
        truncates = k < logits.shape[-1]
        most = int(k.masked_fill(~truncates, 1).max())
        values, ids = logits.topk(most, dim=-1)
        values.masked_fill_(torch.arange(most, device=k.device) >= k[:, None], -torch.inf)
        largest = torch.full_like(logits, -torch.inf).scatter_(-1, ids, values)
        logits = torch.where(truncates[:, None], largest, logits)
    return draw(logits, generators, None, p)


def _forget_half_update(model: torch.nn.Module) -> None:
    """Drop the weights of layers that an unfinished update loaded in part.

    vLLM skips such layers when a reload begins, and would count their old weights as new.
    """
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack output layers anew from their weights.

    vLLM's CPU linear layers multiply with a packed copy of their weight. A layerwise reload packs again every layer
    that it loaded, and so passes over an output layer that only shares the embedding's weight: it would keep the old
    logits, without a word.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Make mixture-of-experts layers pack their weights again after the reload that follows.

    On a CPU their kernel multiplies with weights packed at the first load, and a reload that finds a kernel leaves it
    be: the experts would be read in the wrong order. Elsewhere the kernel is told the new weights and must stay.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
