"""Adapters of a rank's part of the model: made, filled, merged into the weights, and gathered from all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.batch.shard import Outputs, Shard
from engines.interfaces import OffloadPart
from engines.megatron.extensions.extension import Extension, Stage
from engines.megatron.weights import cut_share, export_tensors, name_parameters, number_layers
from engines.models.adapters import ExpertAdapter, draw_start, name_in_peft
from engines.models.folders import ADAPTER_WEIGHTS
from engines.models.folders.adapter_folder import save_adapter_folder
from engines.models.safetensors_folder import SafetensorsFolder
from engines.weight_digest import DigestPlan
from hardware.megatron.adapters import GroupedAdapter, LinearAdapter, keep_less

_LOOKED_AT = 4
"""Number of weights whose digests are compared with those of the model's folder after a sync."""


class Adapters(Extension):
    """The adapters of this rank's linear layers. A is drawn at random and B is zero, so that they begin as nothing; or
    both are read from a folder.

    Attributes:
        tensors: A and B of this rank by Megatron's names. learned: they and a critic's head.

    Args:
        stage: this rank's part of the model, to whose layers the adapters are added; its settings have a ``lora.rank``
            above 0.
    """

    freezes_head = True

    def __init__(self, stage: Stage):
        module, model, config = stage.module, stage.model, stage.config
        stated = config.lora.list_adapters(model)
        self._weights = {weight.name: weight for adapter in stated for weight in (adapter.a, adapter.b)}
        self._targets = {name for adapter in stated for name in adapter.tensors}
        self.parameters = sorted({each.parameter for each in stated if isinstance(each, ExpertAdapter)})
        layers: dict[str, Any] = number_layers(module, module.named_modules())
        self.tensors: dict[str, torch.nn.Parameter] = {}
        self._of_weight: dict[Tensor, LinearAdapter | GroupedAdapter] = {}
        for adapter in stated:
            if isinstance(adapter, ExpertAdapter):
                if experts := layers.get(adapter.weight.name.rpartition(".")[0]):
                    parameter = getattr(experts, adapter.weight.name.rpartition(".")[2])
                    made = GroupedAdapter(experts, parameter, config.lora.rank, config.lora.scale)
                    self._of_weight[parameter] = made
                    self.tensors |= {adapter.a.name: made.a, adapter.b.name: made.b}
            elif layer := layers.get(adapter.weight.name.removesuffix(".weight")):
                places = {name: place for place, name in enumerate(adapter.targets)}
                tensors = adapter.weight.tensors.items()
                rows = [torch.full((shape[0], 1), places.get(name, -1)) for name, shape in tensors]
                owners = cut_share(adapter.b, rows)[:, 0]  # the target of each row on this rank, -1 for none
                made = LinearAdapter(
                    layer, module.config, owners, len(adapter.targets), config.lora.rank, config.lora.scale
                )
                self._of_weight[layer.weight] = made
                self.tensors |= {adapter.a.name: made.a, adapter.b.name: made.b}
        keep_less(module.decoder)
        heads = {name: each for name, each in name_parameters(module).items() if name in model.weights}
        heads = {name: (model.weights[name], each) for name, each in heads.items() if model.weights[name].is_head}
        self.learned = {name: (self._weights[name], each) for name, each in self.tensors.items()} | heads
        drawn = {name: shape for adapter in stated for name, shape in adapter.a.tensors.items()}
        start = config.lora.start
        self.fill(
            load_file(Path(start, ADAPTER_WEIGHTS))
            if start
            else {name: draw_start(name, shape) for name, shape in drawn.items()}
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
            tensor.copy_(cut_share(weight, whole))

    def merge(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's part of a weight with its adapters merged into it; None where it has none."""
        adapter = self._of_weight.get(parameter)
        return adapter.merge(parameter) if adapter else None

    def export(self, value_of=lambda parameter: parameter.data) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(PEFT's name, full tensor)`` of every adapter, on every rank of the model-parallel group. Collective.

        Args:
            value_of: function of a parameter that returns the tensor to export, such as its gradient.
        """
        found = export_tensors(self.tensors, self._weights.__getitem__, value_of)
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
    found = engine.extensions["adapters"].export()
    if engine.dp_rank or not engine.is_leader:
        for _ in found:  # a collective
            pass
        return []
    settings, has_others = engine.config.lora.peft_settings, engine.model.vision is not None
    return save_adapter_folder(
        found, settings, engine.model.folder, folder, has_others, engine.extensions["adapters"].parameters
    )


@torch.no_grad()
def list_frozen(engine: Any, plan: DigestPlan, sent: Mapping[str, int]) -> list[str]:
    """List weights that were sent as the model's folder has them, although their adapters change them; of a few
    weights, which are others at each sync. Collective; the first replica's leader has the list.

    The sum is computed here from folder and adapters, by no function that a weight takes on its way to rollout engines.

    Args:
        plan: the plan of the digests, with another seed at each sync. sent: name of a tensor -> digest.
    """
    values = dict(engine.extensions["adapters"].export())  # collective
    if engine.dp_rank or not engine.is_leader:
        return []
    folder, dtype, found = SafetensorsFolder(engine.model.folder), getattr(torch, engine.config.dtype), []
    names = sorted(name for each in engine.config.lora.list_adapters(engine.model) for name in each.targets)
    for number in np.random.default_rng(plan.seed).permutation(len(names))[:_LOOKED_AT]:
        name, digests = names[number], {}
        base = folder[name].to(dtype)
        a, b = (values[name_in_peft(engine.model, name, kind)].cpu().float() for kind in "AB")
        whole = base.float().addmm(b, a, alpha=engine.config.lora.scale).to(dtype)
        for _ in plan.digest([("base", base), ("whole", whole)], digests):
            pass
        if digests["whole"] != digests["base"] == sent[name]:
            found.append(name)
    return found


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
        with self._engine.extensions["adapters"].switched_off():
            return self._engine.forward(shard, raw, every)

    def offload(self, parts: Sequence[OffloadPart]) -> None:
        """Move nothing: the weights are the engine's."""

    def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Move nothing: the weights are the engine's."""
