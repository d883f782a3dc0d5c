"""Where each token of a micro-batch sits on this rank: one index map, one gather in, one scatter out."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hardware.context_parallel import sum_over_ranks
from hardware.masks import LayoutKind, MaskSpec, slot_places
from hardware.rules import CAUSAL, Rule, slot_unit


@dataclass(frozen=True)
class Layout:
    """The plan of one micro-batch on one context-parallel rank, built once and used for every column.

    Worked example, ``Layout.build((3, 1), kind, tp=2)`` for the flat stream ``a b c | d``::

        bshd  source [[0 1 2 0] [3 0 0 0]]   valid [[1 1 1 0] [1 0 0 0]]
        thd   source [[0 1 2 0  3 0]]        valid [[1 1 1 0  1 0]]

    Attributes:
        kind: ``"bshd"`` or ``"thd"``.
        lengths: real tokens of each sequence. padded: its slots over all context-parallel ranks. A thd layout of a
            fixed size has one sequence more, without a token, that holds what is left of it.
        source: ``[b, s]`` long, each slot's token in the flat stream; 0 on padding.
        valid: ``[b, s]`` bool, a real token: the 2-D mask kept for unpadding, never handed to attention.
    """

    kind: LayoutKind
    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    cp: int
    cp_rank: int
    source: Tensor
    valid: Tensor

    @classmethod
    def build(
        cls,
        lengths: tuple[int, ...],
        kind: LayoutKind,
        *,
        tp: int = 1,
        cp: int = 1,
        cp_rank: int = 0,
        multiple: int = 1,
        slots: int = 0,
        device: torch.device | str = "cpu",
    ) -> "Layout":
        """Plan a micro-batch of sequences with ``lengths`` tokens each.

        Each sequence (thd) or the longest one (bshd) is padded to a multiple of ``tp``, so that sequence parallelism
        can cut it, or of ``tp * 2 * cp`` under context parallelism.

        Args:
            multiple: pads each sequence to a multiple of this as well.
            slots: exactly this many slots over all ranks, of the row (thd) or of each row (bshd); 0 takes as many as
                are needed.

        Raises:
            ValueError: there is no token at all, or the slots do not hold them or cannot be cut over the ranks.
        """
        if not any(lengths):
            raise ValueError(f"Layout: a micro-batch needs at least one token, got lengths {lengths}")
        unit = slot_unit(tp, cp, multiple)
        padded = -(-np.asarray(lengths, dtype=np.int64) // unit) * unit
        if kind == "bshd":
            padded[:] = padded.max()
        if slots:
            lengths, padded = _fill(tuple(lengths), padded, kind, slots, unit)
        sequence, position = slot_places(tuple(padded.tolist()), cp, cp_rank)
        size = np.asarray(lengths, dtype=np.int64)
        valid = position < size[sequence]
        source = np.where(valid, (np.cumsum(size) - size)[sequence] + position, 0)
        rows = len(lengths) if kind == "bshd" else 1
        columns = (torch.from_numpy(x.reshape(rows, -1)).to(device) for x in (source, valid))
        return cls(kind, tuple(lengths), tuple(padded.tolist()), cp, cp_rank, *columns)

    @property
    def num_valid(self) -> int:
        """Real tokens on this rank."""
        return len(self._slots)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """``(segment, position)`` of every slot, both ``[b, s]``; the segment of a padding slot is -1."""
        return self.mask_spec().places(self.cp_rank)

    @cached_property
    def _slots(self) -> Tensor:
        """Flattened slots that hold real tokens, in the order of the flat stream within this rank."""
        return self.valid.flatten().nonzero()[:, 0]

    @cached_property
    def _tokens(self) -> Tensor:
        """The token of each of those slots."""
        return self.source.flatten()[self._slots]

    def pack(self, flat: Tensor, fill: float = 0) -> Tensor:
        """``[N, ...] -> [b, s, ...]``: each slot's token, ``fill`` on padding."""
        local = flat[self.source]
        pad = ~self.valid.view(*self.valid.shape, *[1] * (flat.dim() - 1))
        return local.masked_fill(pad, fill)

    def unpack(self, local: Tensor, group=None) -> Tensor:
        """``[b, s, ...] -> [N, ...]``: every real slot back to its place in the flat stream.

        Args:
            group: context-parallel group to sum over, after which each rank holds every token; the backward hands each
                rank the gradient of its own slots. Without it the tokens of other ranks are zero.
        """
        tokens = local.flatten(0, 1).index_select(0, self._slots)
        if self.cp == 1:
            return tokens  # slots lie in the order of the stream
        flat = local.new_zeros(sum(self.lengths), *local.shape[2:]).index_copy(0, self._tokens, tokens)
        return flat if group is None else sum_over_ranks(flat, group)

    def mask_spec(self, rules: tuple[Rule, ...] = (CAUSAL,), image_block: Tensor | None = None) -> MaskSpec:
        """The attention rules of this micro-batch, one per layer or one for all.

        Args:
            image_block: ``[N]``, the image of its sequence that each token belongs to, -1 for text.
        """
        blocks = None if image_block is None else image_block.cpu().numpy()
        return MaskSpec(self.kind, self.lengths, self.padded, self.cp, self.cp_rank, rules, blocks)


def _fill(lengths: tuple[int, ...], padded: np.ndarray, kind: LayoutKind, slots: int, unit: int):
    """Lengths and padded lengths that take exactly ``slots``.

    What a pack leaves over becomes a sequence of its own without a token: stretching the last sequence over it would
    move its chunks under context parallelism.
    """
    need = int(padded.max() if kind == "bshd" else padded.sum())
    if slots < need or slots % unit:
        raise ValueError(
            f"Layout: {len(lengths)} sequences need {need} slots in units of {unit}, but slots={slots}; raise "
            "--actor.slots or lower --actor.micro-batch-tokens"
        )
    if kind == "bshd":
        return lengths, np.full_like(padded, slots)
    return (*lengths, 0), np.append(padded, slots - need)
