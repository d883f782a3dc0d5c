"""A call of ``varlen_attn``: its arguments, the sizes that follow from them, and its mask.

Sources: torch 2.13, ``torch/nn/attention/varlen.py`` and ``flash_attn/flash_api.cpp`` of ATen; 2.11 and 2.14 compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TYPES = (torch.float16, torch.bfloat16)
"""Types in which the kernels compute."""
MAX_HEAD = 256
HEAD_UNIT = 8
"""Heads are at most that wide, and a multiple of that."""


@dataclass(frozen=True)
class Call:
    """The arguments of ``torch_attn::_varlen_attn`` by their names.

    Attributes:
        stands_for_16_bits: a type that is accepted instead of bf16. The emulator takes fp32, so that its results differ
            from a device's by rounding alone. None accepts only a device's types.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window_size: tuple[int, int]
    scale: float | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    stands_for_16_bits: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return self.cu_seq_q, self.cu_seq_k

    @cached_property
    def query_ends(self) -> list[int]:
        return self.cu_seq_q.tolist()

    @cached_property
    def key_ends(self) -> list[int]:
        return self.cu_seq_k.tolist()

    @cached_property
    def query_lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.query_ends, self.query_ends[1:])]

    @cached_property
    def key_lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.key_ends, self.key_ends[1:])]

    @cached_property
    def scaled_by(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def compute_allowed(self, queries: int, keys: int) -> Tensor:
        """Compute the mask ``[queries, keys]``, True where a query sees a key; the last query sees the last key."""
        before, after = self.window_size
        query, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
        see = torch.ones(queries, keys, dtype=torch.bool)
        if before >= 0:
            see &= key >= query - before
        if after >= 0:
            see &= key <= query + after
        return see

    def list_groups(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield groups of sequences of equal sizes, by token numbers: ``(queries [n, q], keys [n, k], mask [q,
        k])``."""
        sizes: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(zip(self.query_lengths, self.key_lengths)):
            if size[0]:
                sizes.setdefault(size, []).append(number)
        for (queries, keys), members in sizes.items():
            starts, key_starts = (torch.tensor(ends)[members, None] for ends in (self.query_ends, self.key_ends))
            see = self.compute_allowed(queries, keys)
            yield starts + torch.arange(queries), key_starts + torch.arange(keys), see
