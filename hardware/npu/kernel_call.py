"""A call of ``npu_fusion_attention``: its arguments, the sizes that follow from them, and its mask.

Sources: the operator's page in the op-plugin documentation, and its tiling in CANN.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
TRIANGLE = 2048
"""Side of the compressed causal mask."""
NO_LIMIT = 2147483647
"""Default of ``pre_tockens`` and ``next_tockens``."""


def build_triangle(device: torch.device | str = "cpu") -> Tensor:
    """Build the mask that ``sparse_mode`` 2, 3 and 4 expect: ``[2048, 2048]`` bool, True above the diagonal."""
    return torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device).triu(1)


class Call:
    """The arguments of one call of ``npu_fusion_attention`` by their names in the schema, and the sizes that follow.

    A size may be read only after the requirements from which it follows have been checked.
    """

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments

    def __getattr__(self, name: str):
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(name) from None

    @cached_property
    def packed(self) -> bool:
        return self.input_layout == "TND"

    def _size(self, tensor: Tensor, letter: str) -> int:
        return tensor.shape[self.input_layout.index(letter)]

    @cached_property
    def head_dim(self) -> int:
        if "H" in self.input_layout:
            return self._size(self.query, "H") // self.head_num
        return self._size(self.query, "D")

    @cached_property
    def kv_heads(self) -> int:
        if "H" in self.input_layout:
            return self._size(self.key, "H") // self.head_dim
        return self._size(self.key, "N")

    @cached_property
    def query_lengths(self) -> list[int]:
        """Number of queries of each sequence."""
        return self._lengths(self.query, self.actual_seq_qlen)

    @cached_property
    def key_lengths(self) -> list[int]:
        return self._lengths(self.key, self.actual_seq_kvlen)

    def _lengths(self, tensor: Tensor, cumulative: list[int] | None) -> list[int]:
        if not self.packed or cumulative is None:
            return [self._size(tensor, "S")] * self._size(tensor, "B")
        # What does not grow is a sequence of no tokens: so does the tiling, and so are sequences left out at the end.
        return [max(0, end - start) for start, end in zip([0, *cumulative], cumulative)]

    @cached_property
    def compressed(self) -> bool:
        return self.sparse_mode in (2, 3, 4)

    def compute_allowed(self, sequence: int) -> Tensor:
        """Compute the mask of a sequence, ``[1 or N, Sq, Skv]`` bool, True where a query sees a key."""
        queries, keys = self.query_lengths[sequence], self.key_lengths[sequence]
        if self.atten_mask is None:
            return torch.ones(1, queries, keys, dtype=torch.bool)
        query, key = torch.arange(queries)[:, None], torch.arange(keys)
        corner = query + keys - queries  # the key of a query's diagonal where the last query sees the last key
        if self.sparse_mode == 2:
            return (key <= query)[None]
        if self.sparse_mode == 3:
            return (key <= corner)[None]
        if self.sparse_mode == 4:
            return ((key <= corner + self.next_tockens) & (key >= corner - self.pre_tockens))[None]
        return ~self.get_mask(sequence).bool()

    def get_mask(self, sequence: int) -> Tensor:
        """Return the part ``[1 or N, Sq, Skv]`` of an uncompressed mask for one sequence."""
        mask, queries, keys = self.atten_mask, self.query_lengths[sequence], self.key_lengths[sequence]
        if mask.dim() == 4:
            return mask[min(sequence, len(mask) - 1)]
        if self._own_masks:
            start, key_start = sum(self.query_lengths[:sequence]), sum(self.key_lengths[:sequence])
            return mask[None, start : start + queries, key_start : key_start + keys]
        return mask[None, :queries, :keys]

    @cached_property
    def _own_masks(self) -> bool:
        """Each sequence has a mask of its own: ``[B, ...]``, or the part of ``[T, T]`` on the diagonal."""
        if self.atten_mask is None or self.sparse_mode != 1:
            return False
        if self.atten_mask.dim() == 4:
            return self.atten_mask.shape[0] > 1
        shared = (max(self.query_lengths), max(self.key_lengths))
        return self.packed and self.atten_mask.shape != shared

    def list_groups(self) -> dict[tuple, list[int]]:
        """Group the sequences that have equal lengths and masks, and so can be computed together."""
        grouped: dict[tuple, list[int]] = {}
        for number, sizes in enumerate(zip(self.query_lengths, self.key_lengths)):
            if sizes[0]:
                grouped.setdefault((*sizes, number if self._own_masks else None), []).append(number)
        return grouped
