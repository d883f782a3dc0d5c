"""Joins: how HuggingFace's tensors of a folder become one of Megatron's, and how they come out of it again.

A family states a join beside the tensors of each parameter. Whoever loads, cuts, gathers, exports, plans or digests a
parameter asks its join, and knows no form of tensors itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # joins are stated before anything takes the time to import torch
    from torch import Tensor

Shape = tuple[int, ...]


class TensorReader(Protocol):
    """Reads the tensors of a folder by name."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def read_rows(self, name: str, start: int, count: int) -> Tensor:
        """Read ``count`` rows of a tensor, from row ``start``, and no others."""
        ...


@dataclass(frozen=True)
class Join:
    """Takes the only tensor as it is, or puts several one below another.

    Attributes:
        parts: equal runs of rows that are cut over ranks each for itself. Of a gate above an up projection,
            ``[2 ffn, h]``, each rank then has the same columns of both.
    """

    parts: int = 1

    def find_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Find the shape of the joined tensor, before it is cut."""
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join HuggingFace's tensors to Megatron's, of the shape that ``find_shape`` says."""
        return concatenate(tensors)

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Split a joined tensor into HuggingFace's, of these shapes: the inverse of ``join``."""
        return list(whole.split([shape[0] for shape in shapes]))

    def count_share(self, length: int, ranks: int) -> int:
        """Count what one of so many ranks gets of an axis of this length."""
        return length // ranks

    def cut(self, whole: Tensor, axis: int, ranks: int, rank: int) -> Tensor:
        """Cut out what a rank gets of an axis."""
        shares = [part.chunk(ranks, dim=axis)[rank] for part in whole.chunk(self.parts)]
        return concatenate(shares)

    def gather(self, shares: Sequence[Tensor], axis: int) -> Tensor:
        """Join what all ranks have of an axis: the inverse of ``cut``."""
        parts = zip(*(share.chunk(self.parts) for share in shares))
        return concatenate([concatenate(part, axis) for part in parts])

    def read_share(self, folder: TensorReader, tensors: Mapping[str, Shape], ranks: int, rank: int) -> list[Tensor]:
        """Read what a rank gets of the first axis, which has the experts, and no more than that."""
        ((name, shape),) = tensors.items()
        count = shape[0] // ranks
        return [folder.read_rows(name, rank * count, count)]

    def split_module(self, values: Tensor, tensors: Mapping[str, Shape]) -> dict[str, Tensor]:
        """Split the one tensor of transformers' module, or its gradient, into a folder's tensors, by their names."""
        shape = next(iter(tensors.values()))
        return dict(zip(tensors, values.reshape(len(tensors), *shape), strict=True))


WHOLE = Join()
GATED = Join(parts=2)
"""Puts the gate above the up projection; a folder has a tensor of each, or one of both in this order."""


@dataclass(frozen=True)
class Vocabulary(Join):
    """Takes the only tensor, a row for each token; zeros below it make the rows a multiple of the ranks."""

    def count_share(self, length: int, ranks: int) -> int:
        return math.ceil(length / ranks)

    def cut(self, whole: Tensor, axis: int, ranks: int, rank: int) -> Tensor:
        count = self.count_share(len(whole), ranks)
        missing = count * ranks - len(whole)
        padded = concatenate([whole, whole.new_zeros(missing, *whole.shape[1:])])
        return padded.chunk(ranks, dim=axis)[rank]

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [whole[: shapes[0][0]]]


@dataclass(frozen=True)
class Grouped(Join):
    """Takes the first part of each of some runs of rows, then the second: tensor parallelism cuts between groups.

    Of queries, keys and values, ``[heads * d, h]`` and twice ``[kv_heads * d, h]``, a group is the queries of one head
    of keys, its keys and its values. So each rank has all that its heads need.

    Attributes:
        groups: number of parts of each run. runs: rows of each run.
        order: a folder's tensors are grouped already, with runs in another order: the place among ``runs`` of each run
            of Megatron's. Empty where a folder has one run below another, in one tensor or several.
    """

    groups: int = 1
    runs: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        if not self.order:
            return _group(_recut(tensors, self.runs), self.groups)
        runs = _ungroup(_group(tensors, self.groups), self.groups, self.runs)
        return _group([runs[place] for place in self.order], self.groups)

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        rows = [shape[0] for shape in shapes]
        if not self.order:
            return list(_recut(_ungroup(whole, self.groups, self.runs), rows))
        parts = _ungroup(whole, self.groups, [self.runs[place] for place in self.order])
        runs = dict(zip(self.order, parts))
        return _ungroup(_group([runs[place] for place in sorted(runs)], self.groups), self.groups, rows)


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Put tensors end to end; one alone is taken as it is."""
    if len(tensors) == 1:
        return tensors[0]
    import torch

    return torch.cat(list(tensors), dim=axis)


def _recut(tensors: Sequence[Tensor], rows: Sequence[int]) -> Sequence[Tensor]:
    """Cut tensors that lie one below another into runs of so many rows."""
    if [len(tensor) for tensor in tensors] == list(rows):
        return tensors
    return concatenate(tensors).split(list(rows))


def _group(runs: Iterable[Tensor], groups: int) -> Tensor:
    """Join runs of rows: the first of ``groups`` parts of each run, then the second."""
    return concatenate([run.unflatten(0, (groups, -1)) for run in runs], axis=1).flatten(0, 1)


def _ungroup(whole: Tensor, groups: int, rows: Iterable[int]) -> list[Tensor]:
    """Take runs of so many rows apart: the inverse of ``_group``."""
    parts = whole.unflatten(0, (groups, -1)).split([count // groups for count in rows], dim=1)
    return [part.flatten(0, 1) for part in parts]
