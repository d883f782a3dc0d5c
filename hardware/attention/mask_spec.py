"""Mask specifications: the attention mask of a micro-batch, as data.

A ``MaskSpec`` names rules and lengths. A platform lowers it to arguments of its attention kernels
(``Platform.build_attention_inputs``). ``hardware.attention.dense.oracle`` has the dense mask with which tests compare
every lowering.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hardware.attention.rules import CAUSAL, Rule

LayoutKind = Literal["bshd", "thd"]


def list_zigzag_positions(padded: int, cp: int, cp_rank: int) -> np.ndarray:
    """Return the positions of one padded sequence that a context-parallel rank holds, in the rank's order.

    The sequence is cut into ``2 * cp`` chunks and rank r takes chunks r and ``2 * cp - 1 - r``, so that every rank does
    the same amount of causal work (Llama 3 report, section 3.3.2). With ``padded=8, cp=2`` rank 0 holds ``[0, 1, 6,
    7]`` and rank 1 holds ``[2, 3, 4, 5]``.
    """
    if cp == 1:
        return np.arange(padded)
    chunks = np.arange(padded).reshape(2 * cp, -1)
    return np.concatenate([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])


def expand_counts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return owner and index within it for each of ``sum(counts)`` items: ``[2, 1]`` gives ``([0, 0, 1], [0, 1,
    0])``."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def locate_slots(padded: tuple[int, ...], cp: int, cp_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequence and position of every slot of a context-parallel rank, one sequence after another.

    Args:
        padded: length of each sequence with its padding, over all ranks; a multiple of ``2 * cp`` if ``cp > 1``.

    Returns:
        ``(sequence, position)``, both ``[sum(padded) / cp]``; a position past the sequence's end is padding.
    """
    total = np.asarray(padded, dtype=np.int64)
    sequence, within = expand_counts(total // cp)
    if cp == 1:
        return sequence, within
    chunk = (total // (2 * cp))[sequence]
    low = within < chunk
    return sequence, np.where(low, cp_rank * chunk + within, (2 * cp - 1 - cp_rank) * chunk + within - chunk)


def locate_gathered_keys(
    cp: int, start: np.ndarray, chunk: np.ndarray | int, position: np.ndarray, slots: int
) -> np.ndarray:
    """Return the index of positions among the keys gathered over context-parallel ranks. The arrays broadcast.

    Args:
        start: first slot of the position's sequence on a rank.
        chunk: padded length of that sequence / ``2 * cp``.
        position: the positions in their sequences.
        slots: number of slots of each rank.
    """
    number = position // chunk
    rank = np.minimum(number, 2 * cp - 1 - number)
    return rank * slots + start + (number >= cp) * chunk + position % chunk


@dataclass(frozen=True)
class Sharing:
    """The sequences of a micro-batch that begin alike: the slots of one of them hold the common first tokens.

    A sequence with ``counts[i]`` shared tokens has slots only for the tokens after them. Its owner may in turn share
    its first tokens with another, so that owners form a tree.

    Attributes:
        owners: for each sequence, the sequence whose slots hold its first tokens; its own number if none are shared.
        counts: for each sequence, the number of shared first tokens; 0 if none are shared.
    """

    owners: tuple[int, ...]
    counts: tuple[int, ...]

    def check(self, lengths: tuple[int, ...]) -> None:
        """Raise ValueError if an owner does not have the tokens that it holds for another sequence."""
        if not len(self.owners) == len(self.counts) == len(lengths):
            raise ValueError(
                f"Sharing: {len(self.owners)} owners and {len(self.counts)} counts of {len(lengths)} sequences"
            )
        for number, (owner, count) in enumerate(zip(self.owners, self.counts)):
            if not count and owner == number:
                continue
            # An owner's own tokens reach beyond those that it has from another: up a chain counts fall, to its end.
            if not self.counts[owner] < count <= min(lengths[owner], lengths[number]) or owner == number:
                raise ValueError(
                    f"Sharing: sequence {number} has the first {count} of its {lengths[number]} tokens from sequence "
                    f"{owner}, which holds tokens {self.counts[owner]}..{lengths[owner]}"
                )


@dataclass(frozen=True)
class MaskSpec:
    """The attention rules of one micro-batch, as one context-parallel rank must apply them.

    Attributes:
        kind: ``"bshd"`` (one row per sequence) or ``"thd"`` (all sequences end to end in one row).
        lengths: number of real tokens of each sequence.
        padded: number of slots of each sequence over all context-parallel ranks; all equal for bshd. For a sequence
            that shares its first tokens, only the tokens after them count.
        cp, cp_rank: size of context parallelism and this rank's place in it (zigzag order).
        rules: one rule per layer, or one rule for all layers.
        image_block: ``[sum(lengths)]`` integers, the number of the image that a token belongs to, -1 for none. The same
            number in two sequences means two images.
        prefixes: length of each sequence's prefix, in tokens.
        sharing: the sequences that begin alike, in thd only; None if there are none. Positions count from a sequence's
            first token, wherever its slot is.

    Raises:
        ValueError: the parts contradict each other, or a rule needs images or prefixes that were not given.
    """

    kind: LayoutKind
    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    cp: int = 1
    cp_rank: int = 0
    rules: tuple[Rule, ...] = (CAUSAL,)
    image_block: np.ndarray | None = None
    prefixes: tuple[int, ...] | None = None
    sharing: Sharing | None = None

    def __post_init__(self):
        if len(self.lengths) != len(self.padded):
            raise ValueError(f"MaskSpec: {len(self.lengths)} lengths but {len(self.padded)} padded lengths")
        if self.sharing:
            self.sharing.check(self.lengths)
        if any(n - s > p for n, s, p in zip(self.lengths, self.begins.tolist(), self.padded)):
            raise ValueError("MaskSpec: a sequence is longer than its padded length")
        if self.kind == "bshd" and len(set(self.padded)) > 1:
            raise ValueError(f"MaskSpec: bshd rows must be padded to one length, got {sorted(set(self.padded))}")
        if self.cp > 1 and any(p % (2 * self.cp) for p in self.padded):
            raise ValueError(f"MaskSpec: padded lengths must be multiples of 2*cp = {2 * self.cp}, got {self.padded}")
        if not self.rules:
            raise ValueError("MaskSpec: rules must name at least one rule")
        if self.image_block is None and any(rule.images for rule in self.rules):
            raise ValueError("MaskSpec: a rule sees images both ways, but image_block, which numbers them, is None")
        if self.image_block is not None and len(self.image_block) != sum(self.lengths):
            raise ValueError(
                f"MaskSpec: image_block has {len(self.image_block)} entries for {sum(self.lengths)} tokens"
            )
        if self.prefixes is None and any(rule.prefix for rule in self.rules):
            raise ValueError("MaskSpec: a rule sees the prefix both ways, but prefixes does not say how long it is")
        if self.prefixes is not None and len(self.prefixes) != len(self.lengths):
            raise ValueError(f"MaskSpec: {len(self.prefixes)} prefixes for {len(self.lengths)} sequences")
        if self.prefixes is not None and any(prefix > n for prefix, n in zip(self.prefixes, self.lengths)):
            raise ValueError(f"MaskSpec: prefixes {self.prefixes} are longer than their sequences {self.lengths}")
        if self.sharing:
            self._check_sharing(self.sharing)

    def _check_sharing(self, sharing: Sharing) -> None:
        """Raise ValueError where a token that is shared would see, by some rule, what only one of its sequences has."""
        if self.kind == "bshd":
            raise ValueError("MaskSpec: sequences that are rows share no slots; lay them out as thd")
        if not all(rule.causal for rule in self.rules):
            raise ValueError("MaskSpec: a rule sees all that follows, so that sequences that begin alike share nothing")
        of_prefix, of_images = (any(getattr(rule, name) for rule in self.rules) for name in ("prefix", "images"))
        for number, (owner, count) in enumerate(zip(sharing.owners, sharing.counts)):
            both = np.asarray([owner, number])
            if count and of_prefix and self.prefixes and max(self.prefixes[i] for i in both) > count:
                raise ValueError(
                    f"MaskSpec: sequence {number} shares its first {count} tokens with sequence {owner}, and a prefix "
                    f"of {max(self.prefixes[i] for i in both)} tokens, which see each other, ends after them; share "
                    "the whole prefix or nothing"
                )
            if count and of_images:
                inner, outer = (self.find_images(both, np.full(2, place)) for place in (count - 1, count))
                if ((inner >= 0) & (inner == outer)).any():
                    raise ValueError(f"MaskSpec: sequence {number} shares {count} tokens, which end within an image")

    @cached_property
    def begins(self) -> np.ndarray:
        """The position of each sequence's first token that has a slot of its own, ``[B]``."""
        return np.asarray(self.sharing.counts if self.sharing else [0] * len(self.lengths), dtype=np.int64)

    @property
    def longest(self) -> int:
        """Number of positions of the longest sequence, padding included."""
        return int((self.begins + self.padded).max())

    def find_holders(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the sequence whose slots hold each ``position`` of each ``sequence``. The arrays broadcast."""
        sequence, position = np.broadcast_arrays(sequence, position)
        if self.sharing:
            owners = np.asarray(self.sharing.owners)
            while (shared := position < self.begins[sequence]).any():  # as often as a tree is deep
                sequence = np.where(shared, owners[sequence], sequence)
        return sequence

    def locate_slots(self, cp_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequence and position of every slot of a rank, ``[sum(padded) / cp]`` each."""
        sequence, within = locate_slots(self.padded, self.cp, cp_rank)
        return sequence, self.begins[sequence] + within

    def locate_keys(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the index of each position among the slots of all ranks, in rank order. The arrays broadcast."""
        holder = self.find_holders(sequence, position)
        local = np.asarray(self.padded, dtype=np.int64) // self.cp
        start, within = (np.cumsum(local) - local)[holder], position - self.begins[holder]
        assert ((within >= 0) & (within < self.cp * local[holder])).all(), "a place that has no slot"
        if self.cp == 1:
            return start + within
        return locate_gathered_keys(self.cp, start, local[holder] // 2, within, int(local.sum()))

    @property
    def attended(self) -> set[Rule]:
        """The rules of layers that have attention."""
        return {rule for rule in self.rules if not rule.state}

    def get_rule(self, layer_number: int) -> Rule:
        """Return the rule of a layer; ``layer_number`` counts from 1 over the whole model, as Megatron's does."""
        return self.rules[0] if len(self.rules) == 1 else self.rules[layer_number - 1]

    @cached_property
    def _starts(self) -> np.ndarray:
        lengths = np.asarray(self.lengths, dtype=np.int64)
        return np.cumsum(lengths) - lengths

    def find_images(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the number of the image at each position, -1 for text and padding. The arrays broadcast."""
        inside = position < np.asarray(self.lengths, dtype=np.int64)[sequence]
        if self.image_block is None or not len(self.image_block):
            return np.full(inside.shape, -1)
        return np.where(inside, self.image_block[np.where(inside, self._starts[sequence] + position, 0)], -1)
