"""Settings of low-rank adapters."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from engines.models.folders import ADAPTER_WEIGHTS
from engines.models.spec import ModelSpec
from engines.validation import FINITE, check_types

if TYPE_CHECKING:  # settings are read before anything takes the time to import torch
    from torch import Tensor

    from engines.models.adapters import Adapter


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): they learn in place of the model's weights, which stay as they are.

    A linear layer with the weight W computes ``W x + s B A x``, where A has ``rank`` rows and B ``rank`` columns.
    """

    rank: Annotated[int, Ge(0)] = 0
    """Rank of the adapters; 0 has none and trains the weights."""
    alpha: Annotated[float, Gt(0), FINITE] = 32.0
    """Scale of the adapters: s is alpha / rank, or what scaling says."""
    targets: tuple[str, ...] = ("attention", "mlp")
    """Layers with adapters: attention, mlp, experts, vision, projector, or a layer's name in PEFT's target_modules,
    such as q_proj. The first three are of the language model."""
    scaling: Literal["lora", "rslora"] = "lora"
    """Scale by rank: lora is alpha / rank, rslora is alpha / sqrt(rank) (arXiv:2312.03732)."""
    start: str = ""
    """Folder of adapters to start from, as PEFT saves them. Empty draws A at random and has B zero."""

    def __post_init__(self):
        check_types("actor.lora", self)
        if not self.rank and any(getattr(self, field.name) != field.default for field in fields(self)):
            raise ValueError(
                "actor.lora: rank=0 trains all weights, and other settings of adapters do nothing; set "
                "--actor.lora.rank, or leave them out"
            )

    @property
    def scale(self) -> float:
        """Factor s of the adapters' product."""
        return self.alpha / (self.rank if self.scaling == "lora" else self.rank**0.5)

    @property
    def peft_settings(self) -> dict[str, int | float | bool]:
        """Keys of PEFT's ``adapter_config.json`` that say the same."""
        return {"r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.scaling == "rslora"}

    def list_adapters(self, model: ModelSpec) -> "list[Adapter]":
        """List the adapters of a model, in the order of its weights; none at rank 0."""
        return import_adapters().list_adapters(model, self.rank, self.targets) if self.rank else []

    def make_values(self, model: ModelSpec) -> "dict[str, Tensor]":
        """Make adapters with which a model computes otherwise, by PEFT's names: those to start from, or random ones."""
        if self.start:
            from safetensors.torch import load_file

            return load_file(Path(self.start, ADAPTER_WEIGHTS))
        return import_adapters().draw_adapters(self.list_adapters(model), self.scale)

    def check_model(self, model: ModelSpec, stages: int) -> None:
        """Raise ValueError if a model has not the layers that are to have adapters, the engine has no adapters for
        them, or the folder to start from has others.

        Args:
            stages: number of pipeline stages, each of which must have an adapter.
        """
        if not self.rank:
            return
        adapters = import_adapters()
        available = adapters.list_targets(model)
        groups = dict.fromkeys((*adapters.GROUPS, *available.values(), *(("experts",) if model.experts else ())))
        if unknown := [target for target in self.targets if target not in (*groups, *available)]:
            raise ValueError(
                f"actor.lora: targets names {unknown}, expected {', '.join(groups)} or some of {sorted(available)}; "
                "change --actor.lora.targets"
            )
        if model.experts and "mlp" in self.targets and "experts" not in self.targets:
            raise ValueError(
                f"actor.lora: targets={self.targets} names MLPs, and not the model's routed experts; add experts to "
                "--actor.lora.targets, or leave mlp out"
            )
        self._check_stages(model, stages)
        if self.start:
            adapters.check_start(self.start, self.peft_settings, self.list_adapters(model), "actor.lora")

    def _check_stages(self, model: ModelSpec, stages: int) -> None:
        """Raise ValueError if a pipeline stage has no adapter, and so nothing to learn."""
        found = {adapter.layer // (model.layers // stages) for adapter in self.list_adapters(model)}
        if idle := sorted({*range(stages)} - found):
            raise ValueError(
                f"actor.lora: targets={self.targets} leaves stages {idle} of pp={stages} nothing to learn; add to "
                "--actor.lora.targets or lower --actor.pp"
            )


def import_adapters():
    """Import what only a model with adapters needs."""
    from engines.models import adapters

    return adapters
