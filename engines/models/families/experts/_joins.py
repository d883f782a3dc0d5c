"""Joins of experts: the forms in which folders have the matrices of a layer's experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.models.joins import Join, Shape, TensorReader, concatenate

if TYPE_CHECKING:  # joins are stated before anything takes the time to import torch
    from torch import Tensor


@dataclass(frozen=True)
class StackedExperts(Join):
    """Stacks a tensor of each expert, ``[experts, h, f]``, or its gate and its up projection,
    ``[experts, 2, f, h]``.

    Attributes:
        projections: tensors of each expert.
    """

    projections: int = 1

    def find_shape(self, shapes: Sequence[Shape]) -> Shape:
        count = len(shapes) // self.projections
        return count, *([self.projections] if self.projections > 1 else []), *shapes[0]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        stack = concatenate([tensor.unsqueeze(0) for tensor in tensors])
        return stack.unflatten(0, (-1, self.projections)) if self.projections > 1 else stack

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return list(whole.flatten(0, -3))  # but for the last two axes, of which each of HuggingFace's has its own

    def read_share(self, folder: TensorReader, tensors: Mapping[str, Shape], ranks: int, rank: int) -> list[Tensor]:
        names, count = list(tensors), len(tensors) // ranks
        return [folder[name] for name in names[rank * count :][:count]]


@dataclass(frozen=True)
class FusedExperts(Join):
    """Takes one tensor of all experts, ``[experts, rows, columns]``.

    Attributes:
        projections: matrices of each expert, side by side: a gate and an up projection become ``[experts, 2, f, h]``.
        transposed: a folder has each expert's matrix transposed, ``[experts, columns, rows]``.
    """

    projections: int = 1
    transposed: bool = False

    def find_shape(self, shapes: Sequence[Shape]) -> Shape:
        ((count, *sides),) = shapes
        rows, columns = reversed(sides) if self.transposed else sides
        if self.projections == 1:
            return count, rows, columns
        return count, self.projections, rows // self.projections, columns

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (stack,) = tensors
        stack = stack.transpose(1, 2) if self.transposed else stack
        return stack.unflatten(1, (self.projections, -1)) if self.projections > 1 else stack

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        stack = whole.flatten(1, -2)
        return [stack.transpose(1, 2).contiguous() if self.transposed else stack]

    def split_module(self, values: Tensor, tensors: Mapping[str, Shape]) -> dict[str, Tensor]:
        return dict.fromkeys(tensors, values.transpose(1, 2) if self.transposed else values)
