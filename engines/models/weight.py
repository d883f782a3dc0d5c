"""A parameter of a model, by Megatron's name and by those of HuggingFace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from engines.models.joins import WHOLE, Join

if TYPE_CHECKING:  # weights are listed before anything takes the time to import torch
    from torch import Tensor

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the two parameters that are one where embeddings are tied."""

Head = Literal["language", "value"]
"""Kind of output that the last hidden states become: logits, or the value of a critic."""
Part = Literal["vision", "projector", "language", "router"]
"""Parts of a model that can be frozen: a vision tower's blocks, the layers that map their features to tokens, the
language model, and of it the routers of experts alone."""
Way = Literal["tp", "ep", "etp"]
"""Ways to cut a parameter over ranks: tensor and expert parallelism, and the tensor parallelism of experts."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of Megatron's, and HuggingFace's tensors that it is joined from.

    Attributes:
        name: Megatron's. A family names it within its layer, a ``ModelSpec`` within the model.
        tensors: HF name -> whole shape, in the order in which they are joined.
        join: how they are joined.
        cut: axis of Megatron's tensor -> the way in which it is cut; empty where every rank has all of it.
        module: name of the one tensor of transformers' module that has all of ``tensors``, where it is not as in a
            folder; empty where it is.
        other_forms: the same parameter by other tensors, as some folders have it.
        is_head: it is of a critic's head, which learns where its part is frozen too.
        is_buffer: no gradient reaches it, no optimizer has it, and it is in fp32 at every dtype of the model.
    """

    name: str
    tensors: dict[str, tuple[int, ...]]
    join: Join = WHOLE
    cut: dict[int, Way] = field(default_factory=dict)
    part: Part = "language"
    module: str = ""
    other_forms: tuple[Weight, ...] = ()
    is_head: bool = False
    is_buffer: bool = False

    def within(self, place: str, hf_place: str) -> Weight:
        """Name the same parameter from further out, on both sides."""
        tensors = {hf_place + name: shape for name, shape in self.tensors.items()}
        module = self.module and hf_place + self.module
        others = tuple(form.within(place, hf_place) for form in self.other_forms)
        return replace(self, name=place + self.name, tensors=tensors, module=module, other_forms=others)

    def cut_shape(self, sizes: Mapping[Way, int]) -> tuple[int, ...]:
        """Compute the shape that Megatron gives it on each rank, of as many ranks as ``sizes`` has for each way."""
        shape = list(self.join.find_shape(list(self.tensors.values())))
        for axis, way in self.cut.items():
            shape[axis] = self.join.count_share(shape[axis], sizes[way])
        return tuple(shape)

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """Split Megatron's whole tensor into HuggingFace's, by their names."""
        tensors = self.join.split(whole, list(self.tensors.values()))
        return dict(zip(self.tensors, tensors, strict=True))


def is_adapter(name: str) -> bool:
    """Tell whether a parameter by Megatron's name is of a low-rank adapter."""
    return ".adapter." in name
