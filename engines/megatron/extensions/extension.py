"""Extensions: the kind of a model adds them to a training engine, which calls them and knows none by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import Shard
from engines.config import MegatronConfig
from engines.megatron.checkpoint import Learned
from engines.megatron.layout import Layout
from engines.models.spec import ModelSpec
from hardware.attention.inputs import AttentionInputs


@dataclass(frozen=True)
class Stage:
    """This rank's part of a model, and what it was built from.

    Attributes:
        module: the part, a pipeline stage. transformer: Megatron's configuration of it.
    """

    model: ModelSpec
    config: MegatronConfig
    module: GPTModel
    transformer: TransformerConfig
    device: torch.device


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of this stage over a micro-batch.

    Attributes:
        micro: the micro-batch, on the device. layout: how it is laid out. is_dummy: it is computed for nothing, so that
            all replicas run as many.
        ids: ``[b, s]``. embedded: ``[s / tp, b, h]`` in the place of their embeddings; None on later stages, and where
            the module embeds ids itself.
        inputs: what its attention takes.
        keywords: further arguments of the module.
    """

    micro: TrainBatch
    layout: Layout
    is_dummy: bool
    ids: Tensor
    inputs: AttentionInputs
    embedded: Tensor | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)


class Extension:
    """A kind of model adds this to an engine. A method that it leaves out adds nothing.

    Attributes:
        learned: the only parameters that learn, by Megatron's names, each with how it is cut; None where the settings
            choose them. freezes_head: the output layer has no gradient.
    """

    learned: Learned | None = None
    freezes_head: bool = False

    def start_step(self, shard: Shard, step_tokens: int) -> None:
        """Begin an optimizer step on a replica's shard, of ``step_tokens`` tokens over all replicas. Collective."""

    def prepare(self, forward: ForwardPass) -> ForwardPass:
        """Prepare a forward pass: return it, or another to take its place. Collective over a stage's ranks."""
        return forward

    def finish_step(self) -> None:
        """Finish an optimizer step that was taken. Collective."""

    def measure(self) -> dict[str, float]:
        """Measure the step, as metrics that are alike on every rank. Collective."""
        return {}

    def merge(self, parameter: Tensor) -> Tensor | None:
        """Merge a weight with what this extension has of it, for an export; None where it has nothing."""
        return None


@dataclass(frozen=True)
class Registered:
    """An extension by name.

    Attributes:
        place: its class, as ``pkgutil.resolve_name`` takes it. A model without it loads nothing of it.
        is_needed: tells whether a stage needs it.
    """

    place: str
    is_needed: Callable[[Stage], bool]


EXTENSIONS = {
    "experts": Registered(
        "engines.megatron.extensions.experts:ExpertRouting", lambda stage: stage.model.experts is not None
    ),
    "adapters": Registered("engines.megatron.extensions.adapters:Adapters", lambda stage: stage.config.lora.rank > 0),
    "vision": Registered(
        "engines.megatron.vision.embedding:Vision",
        lambda stage: stage.model.vision is not None and stage.module.pre_process,
    ),
}
"""Name -> an extension, in the order in which they are made and called."""


class Extensions(dict[str, Any]):
    """The extensions of a stage by name; a method of theirs calls that of each."""

    @classmethod
    def build(cls, stage: Stage) -> "Extensions":
        """Build the extensions that a stage needs."""
        needed = {name: each.place for name, each in EXTENSIONS.items() if each.is_needed(stage)}
        return cls({name: resolve_name(place)(stage) for name, place in needed.items()})

    def leave_out(self, name: str) -> "Extensions":
        """Leave one out, which need not be there: return the others."""
        return Extensions({other: each for other, each in self.items() if other != name})

    @property
    def learned(self) -> Learned | None:
        """The only parameters that learn; None where the settings choose them."""
        return next((each.learned for each in self.values() if each.learned is not None), None)

    @property
    def freeze_head(self) -> bool:
        """True where the output layer has no gradient."""
        return any(each.freezes_head for each in self.values())

    def start_step(self, shard: Shard, step_tokens: int) -> None:
        """Begin an optimizer step."""
        for each in self.values():
            each.start_step(shard, step_tokens)

    def prepare(self, forward: ForwardPass) -> ForwardPass:
        """Prepare a forward pass."""
        for each in self.values():
            forward = each.prepare(forward)
        return forward

    def finish_step(self) -> None:
        """Finish an optimizer step."""
        for each in self.values():
            each.finish_step()

    def measure(self) -> dict[str, float]:
        """Measure an optimizer step."""
        return {name: value for each in self.values() for name, value in each.measure().items()}

    def merge(self, parameter: Tensor) -> Tensor:
        """Merge a weight with what extensions have of it, for an export."""
        merged = (each.merge(parameter) for each in self.values())
        return next((value for value in merged if value is not None), parameter.data)
