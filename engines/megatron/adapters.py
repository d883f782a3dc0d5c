"""Adapters of a rank's part of the model: made, filled, merged into the weights, and gathered from all ranks."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file
from torch import Tensor

from engines.batch.shard import Outputs, Shard
from engines.config import MegatronConfig
from engines.interfaces import OffloadPart
from engines.megatron.weights import cut_share, export_tensors, name_parameters, number_layers
from engines.models.adapter_folder import WEIGHTS, save_adapter_folder
from engines.models.spec import ModelSpec
from hardware.megatron.adapters import LinearAdapter


class Adapters:
    """The adapters of this rank's linear layers. A is drawn at random and B is zero, so that they begin as nothing; or
    both are read from a folder.

    Attributes:
        tensors: A and B of this rank by Megatron's names. learned: they and a critic's head, each with how it is cut.

    Args:
        module: this rank's part of the model, to whose layers the adapters are added.
        config: settings of the engine, with a ``lora.rank`` above 0.
    """

    def __init__(self, module: GPTModel, model: ModelSpec, config: MegatronConfig):
        self.model = model
        stated = config.lora.list_adapters(model)
        self._weights = {weight.name: weight for adapter in stated for weight in (adapter.a, adapter.b)}
        self._targets = {name for adapter in stated for name in adapter.tensors}
        layers: dict[str, Any] = number_layers(module, module.named_modules())
        self.tensors: dict[str, torch.nn.Parameter] = {}
        self._of_weight: dict[Tensor, LinearAdapter] = {}
        for adapter in stated:
            if layer := layers.get(adapter.weight.name.removesuffix(".weight")):
                places = {name: place for place, name in enumerate(adapter.targets)}
                tensors = adapter.weight.tensors.items()
                rows = [torch.full((shape[0], 1), places.get(name, -1)) for name, shape in tensors]
                owners = cut_share(adapter.b, rows, model)[:, 0]  # the target of each row on this rank, -1 for none
                made = LinearAdapter(layer, owners, len(adapter.targets), config.lora.rank, config.lora.scale)
                self._of_weight[layer.weight] = made
                self.tensors |= {adapter.a.name: made.a, adapter.b.name: made.b}
        heads = {name: each for name, each in name_parameters(module).items() if name in model.weights}
        heads = {name: (model.weights[name], each) for name, each in heads.items() if model.weights[name].is_head}
        self.learned = {name: (self._weights[name], each) for name, each in self.tensors.items()} | heads
        drawn = {name: shape for adapter in stated for name, shape in adapter.a.tensors.items()}
        start = config.lora.start
        self.fill(
            load_file(Path(start, WEIGHTS)) if start else {name: _draw(name, shape) for name, shape in drawn.items()}
        )
        if config.recompute == "full" and module.pre_process:
            # A layer that is computed again has gradients only where its input has some, which embeddings need not.
            require = lambda _, __, out: out if out.requires_grad else out.requires_grad_(torch.is_grad_enabled())  # noqa: E731
            module.embedding.register_forward_hook(require)

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Fill this rank's parts of the adapters with whole tensors by PEFT's names; others are zero."""
        for name, tensor in self.tensors.items():
            weight = self._weights[name]
            whole = [values.get(part, torch.zeros(shape)) for part, shape in weight.tensors.items()]
            tensor.copy_(cut_share(weight, whole, self.model))

    def merge(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a weight with its adapters merged into it."""
        adapter = self._of_weight.get(parameter)
        return adapter.merge(parameter) if adapter else parameter.data

    def export(self, value_of=lambda parameter: parameter.data) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(PEFT's name, full tensor)`` of every adapter, on every rank of the model-parallel group. Collective.

        Args:
            value_of: function of a parameter that returns the tensor to export, such as its gradient.
        """
        found = export_tensors(self.tensors, self.model, self._weights.__getitem__, value_of)
        return ((name, tensor) for name, tensor in found if name in self._targets)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute without adapters in this context."""
        for adapter in self._of_weight.values():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self._of_weight.values():
                adapter.enabled = True


def save_adapters(engine: Any, folder: str) -> list[str]:
    """Write an engine's adapters as a folder of PEFT's. Collective; the first replica's leader writes.

    Returns:
        the names of the files that this rank wrote.
    """
    found = engine.adapters.export()
    if engine.dp_rank or not engine.is_leader:
        for _ in found:  # a collective
            pass
        return []
    return save_adapter_folder(found, engine.config.lora.peft_settings, engine.model.folder, folder)


class BaseView:
    """The model of an engine without its adapters: a frozen engine that takes no memory beside it.

    Args:
        engine: the engine, which has adapters.
    """

    def __init__(self, engine: Any):
        self._engine, self.model, self.dp_rank, self.dp_size = engine, engine.model, engine.dp_rank, engine.dp_size
        self.is_leader = engine.is_leader

    def forward(self, shard: Shard, raw: bool = False, every: bool = False) -> Outputs | None:
        """Compute outputs as the engine does, without adapters."""
        with self._engine.adapters.switched_off():
            return self._engine.forward(shard, raw, every)

    def offload(self, parts: Sequence[OffloadPart]) -> None:
        """Move nothing: the weights are the engine's."""

    def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Move nothing: the weights are the engine's."""


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw an A as PEFT does, evenly from -1 to 1 over sqrt(in). It is of its name alone, so alike at all sizes."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5
