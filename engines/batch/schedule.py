"""Which replica computes which sequences, in which micro-batches: planned once for all ranks, before a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import xxhash
from torch import Tensor

from engines.batch.balance import balance_costs, estimate_costs
from engines.batch.batch import TrainBatch, find_tokens
from engines.batch.shard import Outputs, Shard
from engines.config import MegatronConfig
from hardware.attention.rules import slot_unit

_SMALL = 8
"""Sequences stay together where they are at most this part of what a replica, or a pipeline stage of it, has to do."""


@dataclass(frozen=True)
class Schedule:
    """The plan of one batch.

    Attributes:
        rows: ``[replica][micro-batch]``, numbers of the sequences; every replica has the same number of micro-batches,
            the last of which may be empty. lengths: tokens of every sequence.
    """

    rows: tuple[tuple[np.ndarray, ...], ...]
    lengths: tuple[int, ...]

    @cached_property
    def digest(self) -> int:
        """63 bits of a hash over who computes what."""
        counts = [[len(rows) for rows in replica] for replica in self.rows]
        hashed = xxhash.xxh3_64(np.asarray(counts, dtype=np.int64).tobytes())
        hashed.update(np.concatenate([self._order, self.lengths]).astype(np.int64).tobytes())
        return hashed.intdigest() >> 1

    @cached_property
    def _order(self) -> np.ndarray:
        return np.concatenate([rows for replica in self.rows for rows in replica])

    @cached_property
    def _places(self) -> Tensor:
        """``[N]``, where each token of the batch is in the shards end to end."""
        stood = np.argsort(self._order)  # where each sequence is among the shards', in the order of the batch
        return torch.from_numpy(find_tokens(np.asarray(self.lengths)[self._order], stood))

    def shards(self, batch: TrainBatch) -> list[Shard]:
        """What each replica is sent."""
        return [self._cut_shard(batch, replica) for replica in range(len(self.rows))]

    def _cut_shard(self, batch: TrainBatch, replica: int) -> Shard:
        parts = [rows for rows in self.rows[replica] if len(rows)]
        counts, num_dummies = tuple(map(len, parts)), len(self.rows[replica]) - len(parts)
        if num_dummies:
            lengths = np.asarray(self.lengths)
            parts.append(np.where(lengths > 0, lengths, np.iinfo(np.int64).max).argmin(keepdims=True))
        return Shard(batch.gather(np.concatenate(parts)), counts, num_dummies, replica, self.digest)

    def restore(self, parts: Sequence[Outputs]) -> Outputs:
        """Outputs of the shards, by replica -> outputs ``[N]`` in the order of the batch."""
        columns = zip(*(vars(part).values() for part in parts))
        return type(parts[0])(*(self.restore_order(torch.cat(column)) for column in columns))

    def restore_order(self, tokens: Tensor) -> Tensor:
        """``[N, ...]``, the shards' tokens end to end -> in the order of the batch."""
        return tokens.index_select(0, self._places.to(tokens.device))


def plan_schedule(
    lengths: Sequence[int],
    config: MegatronConfig,
    hidden: int,
    replicas: int,
    most_sequences: int | None = None,
    together: Sequence[int] | None = None,
) -> Schedule:
    """Balance sequences over replicas by cost, then cut each replica's into micro-batches of at most
    ``config.micro_batch_tokens`` slots; a sequence that is longer is a micro-batch of its own.

    Replicas hold equal numbers of sequences, to one, and exactly equal numbers of micro-batches: as few as this way of
    dealing sequences out can do with, but one for each pipeline stage where a replica has as many sequences. A sequence
    without a token is computed by nobody.

    Args:
        lengths: tokens of each sequence. hidden: the model's hidden size, which weighs attention against the rest.
        most_sequences: sequences that the platform's kernels take in a pack (``Platform.max_pack_sequences``).
        together: ``[B]``, sequences with the same number go to one replica, and in thd to one micro-batch, where they
            are few enough not to spoil the balance: the images of a prompt are then seen once. Replicas then hold
            equal work rather than equal numbers.

    Raises:
        ValueError: no sequence has a token.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    held = np.flatnonzero(sizes)
    if not len(held):
        raise ValueError(f"batch: none of its {len(sizes)} sequences has a token that could be predicted")
    unit = slot_unit(config.tp, config.cp, config.pad_to_multiple_of)
    slots = -(-sizes // unit) * unit
    bundle, alone = np.arange(len(sizes)), together is None
    if not alone:
        largest = min(_find_budget(config), int(slots.sum()) // (_SMALL * replicas * config.pp))
        bundle = _bundle(np.asarray(together), slots, largest, most_sequences)
    _, own = np.unique(bundle[held], return_inverse=True)
    costs = np.bincount(own, weights=estimate_costs(sizes[held], hidden)).astype(np.int64)
    shares = _split_rows(held, balance_costs(costs, replicas, counts_matter=alone)[own], replicas)
    if config.layout == "bshd":
        cut, few = partial(_cut_rows, slots=slots, config=config), config.pp
    else:  # the rest of a pack of a fixed size is a sequence of its own
        each = (most_sequences or len(sizes) + 1) - bool(config.slots)
        cut = partial(_cut_packs, slots=slots, bundle=bundle, budget=_find_budget(config), each=each)
        few = max(config.pp, *(_bound_count(slots[rows], _find_budget(config), each) for rows in shares))
    most = max(map(len, shares))
    count = _find_fewest(lambda count: all(cut(rows, count=count) for rows in shares), min(few, most), most)
    return Schedule(tuple(tuple(cut(rows, count=count)) for rows in shares), tuple(lengths))


def _split_rows(rows: np.ndarray, owner: np.ndarray, parts: int) -> list[np.ndarray]:
    """The rows of each part, in their order."""
    ends = np.cumsum(np.bincount(owner, minlength=parts))
    return np.split(rows[np.argsort(owner, kind="stable")], ends[:-1])


def _find_fewest(fits: Callable[[int], bool], few: int, most: int) -> int:
    """The least count from ``few`` on that fits; ``most`` does, and so does whatever is above one that fits.

    Looked for near ``few`` first, where it nearly always is.
    """
    count, step = few, 1
    while count < most and not fits(count):
        few, count, step = count + 1, min(most, count + step), 2 * step
    while few < count:
        middle = (few + count) // 2
        if fits(middle):
            count = middle
        else:
            few = middle + 1
    return count


def _bound_count(slots: np.ndarray, budget: int, each: int) -> int:
    """No fewer packs than this hold sequences of these slots, of at most ``each`` sequences."""
    alone = slots > budget
    return max(int(alone.sum()) + -(-int(slots[~alone].sum()) // budget), -(-len(slots) // each))


def _find_budget(config: MegatronConfig) -> int:
    return min(config.micro_batch_tokens, config.slots or config.micro_batch_tokens)


def _bundle(together: np.ndarray, slots: np.ndarray, largest: int, most_sequences: int | None) -> np.ndarray:
    """``[B]``, which sequences stay together: those of a number that have at most ``largest`` slots in all."""
    _, number = np.unique(together, return_inverse=True)
    whole, count = np.bincount(number, weights=slots), np.bincount(number)
    fits = (whole <= largest) & (count < (most_sequences or len(slots) + 2))
    return np.where(fits[number], number, number.max() + 1 + np.arange(len(slots)))


def _cut_packs(
    rows: np.ndarray, slots: np.ndarray, bundle: np.ndarray, budget: int, each: int, count: int
) -> list[np.ndarray]:
    """Cut sequences into ``count`` micro-batches, the last of which stay empty where there are too few; an empty list
    where they would not fit."""
    _, own = np.unique(bundle[rows], return_inverse=True)
    whole = np.bincount(own, weights=slots[rows]).astype(np.int64)
    owner = balance_costs(whole, count, counts_matter=False)[own]
    loads, held = np.bincount(owner, weights=slots[rows], minlength=count), np.bincount(owner, minlength=count)
    if ((loads > budget) & (held > 1)).any() or held.max() > each:
        return []
    return _split_rows(rows, owner, count)


def _cut_rows(rows: np.ndarray, slots: np.ndarray, config: MegatronConfig, count: int) -> list[np.ndarray]:
    """As ``_cut_packs``, of rows: those of like lengths go together, since each is as wide as the longest."""
    rest, parts = rows[np.argsort(-slots[rows], kind="stable")], []
    while len(rest):
        taken = max(1, config.micro_batch_tokens // (config.slots or int(slots[rest[0]])))
        parts.append(rest[:taken])
        rest = rest[taken:]
    if len(parts) > count:
        return []
    while len(parts) < min(count, len(rows)):
        parts.sort(key=len)
        parts += np.array_split(parts.pop(), 2)
    return [np.sort(part) for part in parts] + [rows[:0]] * (count - len(parts))
