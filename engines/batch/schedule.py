"""The schedule: which replica computes which sequences in which micro-batches, planned once before a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from engines.batch.balance import balance_costs, estimate_costs
from engines.batch.batch import TrainBatch
from engines.batch.places import find_tokens
from engines.batch.shard import Kind, Shard, change_columns, join_outputs
from engines.config import MegatronConfig
from hardware.attention.rules import compute_slot_unit

_MIN_MICRO_BATCHES = 8
"""Sequences stay together where they are at most this part of what a replica, or a pipeline stage of it, has to do."""


@dataclass(frozen=True)
class Schedule:
    """The plan of one batch of B sequences and N tokens.

    Worked example, ``plan_schedule([5, 3, 2, 4], MegatronConfig(micro_batch_tokens=6), hidden=8, replicas=2)``::

        rows      (([0], [2]), ([3], [1]))     replica 0 computes sequence 0, then 2: 7 tokens, like replica 1
        shards    lengths (5, 2) and (4, 3)    counts (1, 1) of both, no dummies

    Attributes:
        rows: ``[replica][micro-batch]``, numbers ``[b]`` of the sequences; every replica has the same number of
            micro-batches, the last of which may be empty. lengths: tokens of every sequence.
    """

    rows: tuple[tuple[np.ndarray, ...], ...]
    lengths: tuple[int, ...]

    @cached_property
    def digest(self) -> int:
        """Hash the plan, in 63 bits: it fits into an int64 tensor, by which ranks compare it."""
        counts = [[len(rows) for rows in replica] for replica in self.rows]
        hashed = blake2b(np.asarray(counts, dtype=np.int64).tobytes(), digest_size=8)
        hashed.update(np.concatenate([self._order, self.lengths]).astype(np.int64).tobytes())
        return int.from_bytes(hashed.digest()) >> 1

    @cached_property
    def _order(self) -> np.ndarray:
        """Numbers ``[B']`` of the shards' sequences end to end; those without a token are in none."""
        return np.concatenate([rows for replica in self.rows for rows in replica])

    @cached_property
    def _places(self) -> Tensor:
        """Places ``[N]`` in the shards end to end, of each token of the batch."""
        ranks = np.argsort(self._order)  # the inverse of the order: sequences of the batch -> places among the shards'
        return torch.from_numpy(find_tokens(np.asarray(self.lengths)[self._order], ranks))

    def shards(self, batch: TrainBatch) -> list[Shard]:
        """Cut the shard of each replica out of the batch: one copy of it in the order of the replicas, and views."""
        lengths = np.asarray(self.lengths)
        # Dummies compute the batch's shortest sequence with a token: a forward pass needs one.
        shortest = np.asarray([np.where(lengths > 0, lengths, np.iinfo(np.int64).max).argmin()])
        # A micro-batch without a sequence becomes a dummy.
        parts = [[rows for rows in replica if len(rows)] for replica in self.rows]
        dummies = [len(replica) - len(real) for replica, real in zip(self.rows, parts)]
        rows = [np.concatenate([*real, shortest] if count else real) for real, count in zip(parts, dummies)]
        pieces = batch.gather(np.concatenate(rows)).cut(np.cumsum([0, *map(len, rows)]))
        return [
            Shard(piece, tuple(map(len, real)), count, replica, self.digest)
            for replica, (piece, real, count) in enumerate(zip(pieces, parts, dummies, strict=True))
        ]

    def restore(self, parts: Sequence[Kind]) -> Kind:
        """Restore the order of the batch: outputs of the shards, by replica -> outputs ``[N]``."""
        return change_columns(join_outputs(parts), lambda _, column: self.restore_order(column))

    def restore_order(self, tokens: Tensor) -> Tensor:
        """Restore the order of the batch in tokens ``[N, ...]`` of the shards end to end."""
        return tokens.index_select(0, self._places.to(tokens.device))


def plan_schedule(
    lengths: Sequence[int],
    config: MegatronConfig,
    hidden: int,
    replicas: int,
    max_sequences: int | None = None,
    together: Sequence[int] | None = None,
) -> Schedule:
    """Balance sequences over replicas by cost, then cut each replica's into micro-batches of at most
    ``config.micro_batch_tokens`` slots; a sequence that is longer is a micro-batch of its own.

    Replicas hold equal numbers of sequences, to one, and exactly equal numbers of micro-batches: as few as this way of
    dealing sequences out can do with, but one for each pipeline stage where a replica has as many sequences. A sequence
    without a token is computed by nobody.

    Args:
        lengths: tokens of each sequence. hidden: the model's hidden size, which weighs attention against the rest.
        max_sequences: sequences that the platform's kernels take in a pack (``Platform.max_pack_sequences``).
        together: ``[B]``, sequences with the same number go to one replica, and in thd to one micro-batch, where they
            are few enough not to spoil the balance: the images of a prompt are then seen once. Replicas then hold
            equal work rather than equal numbers.

    Raises:
        ValueError: no sequence has a token.
    """
    sizes = np.asarray(lengths, dtype=np.int64)  # [B]
    nonempty = np.flatnonzero(sizes)
    if not len(nonempty):
        raise ValueError(f"batch: none of its {len(sizes)} sequences has a token that could be predicted")
    unit = compute_slot_unit(config.tp, config.cp, config.pad_to_multiple_of)
    slots = -(-sizes // unit) * unit  # [B]: tokens and padding, as a layout gives them
    bundle, single = np.arange(len(sizes)), together is None  # [B]: each sequence is a bundle of its own, or shares one
    if not single:
        largest = min(_find_budget(config), int(slots.sum()) // (_MIN_MICRO_BATCHES * replicas * config.pp))
        bundle = _bundle(np.asarray(together), slots, largest, max_sequences)
    # Bundles are dealt out as wholes: costs are summed to [bundles], and the replica of each goes back to [B'].
    _, number = np.unique(bundle[nonempty], return_inverse=True)
    costs = np.bincount(number, weights=estimate_costs(sizes[nonempty], hidden)).astype(np.int64)
    shares = _split_rows(nonempty, balance_costs(costs, replicas, equal_counts=single)[number], replicas)
    if config.layout == "bshd":
        cut, low = partial(_cut_rows, slots=slots, config=config), config.pp
    else:  # the rest of a pack of a fixed size is a sequence of its own
        capacity = (max_sequences or len(sizes) + 1) - bool(config.slots)
        cut = partial(_cut_packs, slots=slots, bundle=bundle, budget=_find_budget(config), capacity=capacity)
        low = max(config.pp, *(_bound_count(slots[rows], _find_budget(config), capacity) for rows in shares))
    # With a sequence in each micro-batch everything fits, so the longest share bounds the count from above.
    high = max(map(len, shares))
    count = _find_fewest(lambda count: all(cut(rows, count=count) for rows in shares), min(low, high), high)
    return Schedule(tuple(tuple(cut(rows, count=count)) for rows in shares), tuple(lengths))


def _split_rows(rows: np.ndarray, owner: np.ndarray, parts: int) -> list[np.ndarray]:
    """Split rows ``[n]`` by the part ``[n]`` of each; within a part they keep their order."""
    ends = np.cumsum(np.bincount(owner, minlength=parts))  # [parts]; a part may be empty
    # A stable sort lays the parts end to end; the last end is that of all rows, where nothing is split.
    return np.split(rows[np.argsort(owner, kind="stable")], ends[:-1])


def _find_fewest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Find the smallest count from ``low`` on that fits; ``high`` does, and so does every count above one that fits.

    It is looked for near ``low`` first, where it nearly always is.
    """
    # First steps of 1, 2, 4, ... up; then halves of what is left. Everything below `low` is known not to fit.
    count, step = low, 1
    while count < high and not fits(count):
        low, count, step = count + 1, min(high, count + step), 2 * step
    while low < count:
        middle = (low + count) // 2
        if fits(middle):
            count = middle
        else:
            low = middle + 1
    return count


def _bound_count(slots: np.ndarray, budget: int, capacity: int) -> int:
    """Bound the number of packs from below, for sequences of these slots ``[n]`` and ``capacity`` sequences a pack."""
    oversized = slots > budget  # [n] bool: such a sequence has a pack of its own, over the budget
    return max(int(oversized.sum()) + -(-int(slots[~oversized].sum()) // budget), -(-len(slots) // capacity))


def _find_budget(config: MegatronConfig) -> int:
    return min(config.micro_batch_tokens, config.slots or config.micro_batch_tokens)


def _bundle(together: np.ndarray, slots: np.ndarray, largest: int, max_sequences: int | None) -> np.ndarray:
    """Number the bundles that stay together, ``[B]``: sequences of a number with at most ``largest`` slots in all."""
    _, number = np.unique(together, return_inverse=True)  # [B], from 0 on
    sums, count = np.bincount(number, weights=slots), np.bincount(number)  # [numbers]: slots and sequences
    # Fewer than the kernels take, since the rest of a pack of a fixed size is one more; without a limit all fit.
    fits = (sums <= largest) & (count < (max_sequences or len(slots) + 2))
    # The others become bundles of one, under numbers that are free.
    return np.where(fits[number], number, number.max() + 1 + np.arange(len(slots)))


def _cut_packs(
    rows: np.ndarray, slots: np.ndarray, bundle: np.ndarray, budget: int, capacity: int, count: int
) -> list[np.ndarray]:
    """Cut the sequences ``[n]`` of a replica into ``count`` micro-batches, the last of which stay empty where there are
    too few; an empty list where they would not fit."""
    _, number = np.unique(bundle[rows], return_inverse=True)  # [n]: bundles of this replica, from 0 on
    sums = np.bincount(number, weights=slots[rows]).astype(np.int64)
    owner = balance_costs(sums, count, equal_counts=False)[number]
    loads, sizes = np.bincount(owner, weights=slots[rows], minlength=count), np.bincount(owner, minlength=count)
    # A sequence that is longer than the budget is allowed alone, two that are too long together are not.
    if ((loads > budget) & (sizes > 1)).any() or sizes.max() > capacity:
        return []
    return _split_rows(rows, owner, count)


def _cut_rows(rows: np.ndarray, slots: np.ndarray, config: MegatronConfig, count: int) -> list[np.ndarray]:
    """Cut like ``_cut_packs``, for bshd: sequences of like lengths go together, since each row is as wide as the
    longest."""
    remainder, parts = rows[np.argsort(-slots[rows], kind="stable")], []
    while len(remainder):
        # The first of the remainder is the longest and sets s; as many rows go with it as keep b * s within the limit.
        height = max(1, config.micro_batch_tokens // (config.slots or int(slots[remainder[0]])))
        parts.append(remainder[:height])
        remainder = remainder[height:]
    if len(parts) > count:
        return []
    # More are asked for than these: the one of most sequences is halved until there are enough, or each has one.
    while len(parts) < min(count, len(rows)):
        parts.sort(key=len)
        parts += np.array_split(parts.pop(), 2)
    return [np.sort(part) for part in parts] + [rows[:0]] * (count - len(parts))


def number_image_sets(batch: TrainBatch) -> list[int] | None:
    """Number the sets of images, ``[B]``: sequences with the same images have the same number, each without images one
    of its own. None where no sequence has an image."""
    if not batch.images or not any(batch.images):
        return None
    numbers: dict = {}
    keys = (tuple(image.digest for image in shown) or row for row, shown in enumerate(batch.images))
    return [numbers.setdefault(key, len(numbers)) for key in keys]
