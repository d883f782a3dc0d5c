"""The layout of a micro-batch on this rank: one index map, one scatter in, one gather out."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hardware.attention.mask_spec import LayoutKind, MaskSpec, Sharing, expand_counts
from hardware.attention.rules import CAUSAL, Rule, compute_slot_unit
from hardware.collectives import sum_over_ranks
from hardware.transfer import to_device


@dataclass(frozen=True)
class Layout:
    """The slot of each token of one micro-batch on one context-parallel rank, built once and used for every column.

    Worked example, ``Layout.build((3, 1), kind, tp=2)`` for the flat stream ``a b c | d`` (``.`` is padding)::

        bshd  [[a b c .] [d . . .]]   slots [0 1 2 4]   valid [[1 1 1 0] [1 0 0 0]]
        thd   [[a b c .  d .]]        slots [0 1 2 4]   valid [[1 1 1 0  1 0]]

    With ``cp=2`` instead sequences are padded to 4 slots and rank 0 holds the first and the last chunk of each::

        thd   [[a .  d .]], rank 1 [[b c  . .]]   slots [0 2], rank 1 [0 1]   tokens [0 3], rank 1 [1 2]

    Of ``a b c | a b d | e`` with ``sharing=Sharing((0, 0, 2), (0, 2, 0))`` the second sequence has one slot of its own,
    and its first two tokens lie where the first sequence's do::

        thd   [[a b c d e]]           slots [0 1 2 0 1 3 4]   positions [[0 1 2 2 0]]

    Attributes:
        kind: ``"bshd"`` or ``"thd"``.
        lengths: real tokens of each sequence. padded: its slots over all context-parallel ranks. A thd layout of a
            fixed size has one more sequence, without a token, that takes the remaining slots.
        shape: ``(b, s)`` of this rank's part.
        slots: ``[n]`` long, the flattened slots that hold real tokens, in the order of the stream. A slot of several
            tokens is read for each of them, and the gradient that comes back is the sum of theirs.
        on_host: ``[n]``, the same on the host.
        tokens: ``[n]`` long, the token that each of them holds; None where they are all N of the stream.
        sharing: the sequences that begin alike; ``padded`` then counts own tokens alone. None where none do.
        scored: ``(slots [m], tokens [m])``, those of both whose scores are asked for; None where all are.
    """

    kind: LayoutKind
    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    cp: int
    cp_rank: int
    shape: tuple[int, int]
    slots: Tensor
    on_host: np.ndarray
    tokens: Tensor | None
    sharing: Sharing | None = None
    scored: tuple[Tensor, Tensor] | None = None

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
        sharing: Sharing | None = None,
        scored: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> "Layout":
        """Lay out a micro-batch of sequences with ``lengths`` tokens each.

        Each sequence (thd) or the longest one (bshd) is padded to a multiple of ``tp``, so that sequence parallelism
        can cut it, or of ``tp * 2 * cp`` under context parallelism.

        Args:
            multiple: pads each sequence so that a context-parallel rank's share of it is a multiple of this.
            slots: exactly this many slots over all ranks, of the row (thd) or of each row (bshd); 0 takes as many as
                are needed.
            sharing: the sequences that begin alike, in thd; whoever calls has compared their tokens.
            scored: ``[N]`` bool, the tokens whose scores are asked for; None asks for all.

        Raises:
            ValueError: there is no token at all, or the slots do not hold them or cannot be cut over the ranks.
        """
        if not any(lengths):
            raise ValueError(f"Layout: a micro-batch needs at least one token, got lengths {lengths}")
        unit = compute_slot_unit(tp, cp, multiple)
        if sharing and not any(sharing.counts):
            sharing = None
        own = np.asarray(lengths, dtype=np.int64) - np.asarray(sharing.counts if sharing else 0)
        padded = -(-own // unit) * unit  # [B], over all ranks
        if kind == "bshd":
            padded[:] = padded.max()  # each sequence is a row, and rows are as wide as the widest
        if slots:
            lengths, padded = _fill(tuple(lengths), padded, kind, slots, unit)
        if sharing and len(lengths) > len(sharing.owners):  # what fills a fixed size shares nothing
            sharing = Sharing((*sharing.owners, len(sharing.owners)), (*sharing.counts, 0))
        spec = MaskSpec(kind, tuple(lengths), tuple(padded.tolist()), cp, cp_rank, sharing=sharing)
        indices, tokens = _map_slots(spec)
        # Both kinds have the same flat slots: a row of bshd is a sequence, thd has all of them in one row.
        rows = len(lengths) if kind == "bshd" else 1
        shape = rows, int(padded.sum()) // cp // rows
        asked = None
        if scored is not None:
            held = np.arange(len(indices)) if tokens is None else tokens
            keep = scored[held]
            asked = to_device(indices[keep], device), to_device(held[keep], device)
        tokens = None if tokens is None else to_device(tokens, device)
        sizes = kind, spec.lengths, spec.padded, cp, cp_rank, shape
        return cls(*sizes, to_device(indices, device), indices, tokens, sharing, asked)

    @property
    def num_valid(self) -> int:
        """Real tokens on this rank."""
        return len(self.slots)

    @cached_property
    def valid(self) -> Tensor:
        """Mask ``[b, s]`` bool, True at slots with a real token: for unpadding, never for attention."""
        mask = torch.zeros(self.shape, dtype=torch.bool, device=self.slots.device)
        mask.view(-1)[self.slots] = True
        return mask

    def list_filled(self, part: int, parts: int) -> Tensor:
        """List the slots with a token in one of ``parts`` equal parts of the hidden states: ``[m]`` long, places in
        ``[s / parts * b]``."""
        s, filled = self.shape[1], np.zeros(self.shape, dtype=bool)
        filled.reshape(-1)[self.on_host] = True
        own = filled.T[s // parts * part : s // parts * (part + 1)]  # [s / parts, b]
        return to_device(np.flatnonzero(own), self.slots.device)

    def pack(self, flat: Tensor, fill: float = 0) -> Tensor:
        """Pack the flat stream into slots: ``[N, ...] -> [b, s, ...]``, ``fill`` on padding."""
        local = flat.new_full((self.shape[0] * self.shape[1], *flat.shape[1:]), fill)
        return local.index_copy_(0, self.slots, self.gather_tokens(flat)).unflatten(0, self.shape)

    def narrow(self) -> "Layout":
        """Leave out all tokens but the scored: what is gathered has those alone, what is scattered 0 elsewhere."""
        return self if self.scored is None else replace(self, slots=self.scored[0], tokens=self.scored[1], scored=None)

    def gather_tokens(self, flat: Tensor) -> Tensor:
        """Gather the tokens of the flat stream that this rank holds: ``[N, ...] -> [n, ...]``."""
        return flat if self.tokens is None else flat.index_select(0, self.tokens)

    def gather_slots(self, local: Tensor) -> Tensor:
        """Gather the slots that hold a token, in the order of the stream: ``[b, s, ...] -> [n, ...]``."""
        return local.flatten(0, 1).index_select(0, self.slots)

    def scatter_tokens(self, local: Tensor, group=None) -> Tensor:
        """Scatter this rank's tokens to their places in the flat stream: ``[n, ...] -> [N, ...]``.

        Args:
            group: context-parallel group to sum over, after which each rank holds every token; the backward hands each
                rank the gradient of its own slots. Without it the tokens of other ranks are zero.
        """
        if self.tokens is None:
            return local
        flat = local.new_zeros(sum(self.lengths), *local.shape[1:]).index_copy(0, self.tokens, local)
        return flat if group is None or self.cp == 1 else sum_over_ranks(flat, group)

    def unpack(self, local: Tensor, group=None) -> Tensor:
        """Unpack every real slot to its place in the flat stream: ``[b, s, ...] -> [N, ...]``.

        Args:
            group: as in ``scatter_tokens``.
        """
        return self.scatter_tokens(self.gather_slots(local), group)

    def build_mask_spec(
        self,
        rules: tuple[Rule, ...] = (CAUSAL,),
        image_block: Tensor | None = None,
        prefixes: tuple[int, ...] | None = None,
    ) -> MaskSpec:
        """Build the attention mask of this micro-batch, as a rule of each layer over sequences and their lengths.

        Args:
            rules: one per layer, or one for all.
            image_block: ``[N]`` on the host, the image of its sequence that each token belongs to, -1 for text.
            prefixes: tokens of each sequence's prefix.
        """
        if prefixes is not None:
            prefixes = prefixes + (0,) * (len(self.lengths) - len(prefixes))  # a filler sequence has none
        blocks = None if image_block is None else image_block.numpy()
        sizes = self.kind, self.lengths, self.padded, self.cp, self.cp_rank
        return MaskSpec(*sizes, rules, blocks, prefixes, self.sharing)


def _map_slots(spec: MaskSpec) -> tuple[np.ndarray, np.ndarray | None]:
    """Map a rank's slots to tokens: ``(slots [n], tokens [n])``. A token lies where attention looks for it as a key."""
    keys = spec.locate_keys(*expand_counts(np.asarray(spec.lengths, dtype=np.int64)))  # [N]
    if spec.cp == 1:
        return keys, None  # n = N: the rank holds every token
    rank, slots = np.divmod(keys, sum(spec.padded) // spec.cp)  # keys of all ranks are in their order
    tokens = np.flatnonzero(rank == spec.cp_rank)
    return slots[tokens], tokens


def _fill(lengths: tuple[int, ...], padded: np.ndarray, kind: LayoutKind, slots: int, unit: int):
    """Fill a fixed size: lengths and padded lengths ``[B]``, or ``[B + 1]`` of a pack, that take exactly ``slots``.

    The remaining slots of a pack become a sequence without a token. Padding the last sequence over them instead would
    move its chunks under context parallelism.
    """
    need = int(padded.max() if kind == "bshd" else padded.sum())
    if slots < need or slots % unit:
        fewer = "shorten the longest sequence" if kind == "bshd" else "lower --actor.micro-batch-tokens"
        raise ValueError(
            f"Layout: {len(lengths)} sequences need {need} slots in units of {unit}, but slots={slots}; raise "
            f"--actor.slots or {fewer}"
        )
    if kind == "bshd":
        return lengths, np.full_like(padded, slots)
    return (*lengths, 0), np.append(padded, slots - need)
