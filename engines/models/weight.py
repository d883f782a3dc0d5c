"""A parameter of a model, by Megatron's name and by those of HuggingFace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the two parameters that are one where embeddings are tied."""

Head = Literal["language", "value"]
"""Kind of output that the last hidden states become: logits, or the value of a critic."""
Part = Literal["vision", "projector", "language"]
"""Parts of a vision-language model: the tower's blocks, what maps their features to tokens, and the language model."""
Join = Literal["whole", "qkv", "gated", "vocabulary"]


@dataclass(frozen=True)
class Weight:
    """A parameter of Megatron's, and the tensors of HuggingFace's that it is joined from along their first axis.

    Attributes:
        name: Megatron's. A family names it within its layer, a ``ModelSpec`` within the model.
        tensors: HF name -> whole shape, in the order in which they are joined.
        join: ``whole`` takes the only tensor as it is, ``qkv`` joins by query group, ``gated`` puts the gate above the
            up projection and cuts each for itself, ``vocabulary`` pads the rows to a multiple of the ranks. The parts
            of ``qkv`` and ``gated`` are a tensor each, or one that has them in this order.
        cut: the axis that tensor parallelism cuts; None where every rank has all of it.
    """

    name: str
    tensors: dict[str, tuple[int, ...]]
    join: Join = "whole"
    cut: int | None = None
    part: Part = "language"

    def within(self, place: str, hf_place: str) -> Weight:
        """Name the same parameter from further out, on both sides."""
        tensors = {hf_place + name: shape for name, shape in self.tensors.items()}
        return replace(self, name=place + self.name, tensors=tensors)

    def cut_shape(self, tp: int) -> tuple[int, ...]:
        """Compute the shape that Megatron gives it on each of ``tp`` tensor-parallel ranks."""
        shapes = list(self.tensors.values())
        shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if self.join == "vocabulary":
            shape[0] = -(-shape[0] // tp) * tp
        if self.cut is not None:
            shape[self.cut] //= tp
        return tuple(shape)
