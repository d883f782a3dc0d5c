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
from engines.batch.beginnings import Beginnings
from engines.batch.places import find_tokens
from engines.batch.shard import Kind, Shard, change_columns, join_outputs
from engines.config import MegatronConfig
from hardware.attention.rules import compute_slot_unit

_PIECES = (8, 4, 3, 2, 1.5, 1.2, 1, 0.8, 0.6, 0.5, 0.35, 0.25, 0.125)
"""Sizes that pieces of a group are tried at, in units of a replica's work were nothing computed twice."""
_MIN_MICRO_BATCHES = 8
"""Sequences stay together if they are at most this part of the work of a replica, or of a pipeline stage of it."""


@dataclass(frozen=True)
class Schedule:
    """The plan of one batch of B sequences and N tokens.

    Worked example, ``plan_schedule([5, 3, 2, 4], MegatronConfig(micro_batch_tokens=6), hidden=8, replicas=2)``::

        rows      (([0], [2]), ([3], [1]))     replica 0 computes sequence 0, then 2: 7 tokens, like replica 1
        shards    lengths (5, 2) and (4, 3)    counts (1, 1) of both, no dummies

    Attributes:
        rows: ``[replica][micro-batch]``, numbers ``[b]`` of the sequences; every replica has the same number of
            micro-batches, the last of which may be empty. lengths: tokens of every sequence.
        beginnings: those that sequences of a micro-batch compute once; None computes each sequence by itself.
    """

    rows: tuple[tuple[np.ndarray, ...], ...]
    lengths: tuple[int, ...]
    beginnings: Beginnings | None = None

    @cached_property
    def digest(self) -> int:
        """Hash the schedule to 63 bits, which fit into an int64 tensor, so that ranks can compare it."""
        counts = [[len(rows) for rows in replica] for replica in self.rows]
        hashed = blake2b(np.asarray(counts, dtype=np.int64).tobytes(), digest_size=8)
        found = [self.beginnings.order, self.beginnings.common] if self.beginnings else []
        hashed.update(np.concatenate([self._order, self.lengths, *found]).astype(np.int64).tobytes())
        return int.from_bytes(hashed.digest()) >> 1

    @cached_property
    def _order(self) -> np.ndarray:
        """Numbers ``[B']`` of the shards' sequences end to end; sequences without a token are left out."""
        return np.concatenate([rows for replica in self.rows for rows in replica])

    @cached_property
    def _places(self) -> Tensor:
        """Places ``[N]`` in the shards end to end, of each token of the batch."""
        ranks = np.argsort(self._order)  # the inverse of the order: sequences of the batch -> places among the shards'
        return torch.from_numpy(find_tokens(np.asarray(self.lengths)[self._order], ranks))

    def shards(self, batch: TrainBatch) -> list[Shard]:
        """Return the shard of each replica: views of one copy of the batch in the order of the replicas."""
        lengths = np.asarray(self.lengths)
        # Dummies compute the batch's shortest sequence with a token: a forward pass needs one.
        shortest = np.asarray([np.where(lengths > 0, lengths, np.iinfo(np.int64).max).argmin()])
        # A micro-batch without a sequence becomes a dummy.
        parts = [[rows for rows in replica if len(rows)] for replica in self.rows]
        dummies = [len(replica) - len(real) for replica, real in zip(self.rows, parts)]
        rows = [np.concatenate([*real, shortest] if count else real) for real, count in zip(parts, dummies)]
        pieces = batch.gather(np.concatenate(rows)).cut(np.cumsum([0, *map(len, rows)]))
        sharing = [tuple(map(self.beginnings.share, real)) if self.beginnings else () for real in parts]
        return [
            Shard(piece, tuple(map(len, real)), count, replica, self.digest, shared)
            for replica, (piece, real, count, shared) in enumerate(zip(pieces, parts, dummies, sharing, strict=True))
        ]

    def count_computed(self) -> int:
        """Count the tokens that are computed; tokens that sequences of a micro-batch share count once."""
        shared = [] if self.beginnings is None else [self.beginnings.share(x) for replica in self.rows for x in replica]
        return sum(self.lengths) - sum(sum(one.counts) for one in shared if one)

    def restore(self, parts: Sequence[Kind]) -> Kind:
        """Join the outputs of the shards, given by replica, in the order of the batch: outputs ``[N]``."""
        return change_columns(join_outputs(parts), lambda _, column: self.restore_order(column))

    def restore_order(self, tokens: Tensor) -> Tensor:
        """Put the tokens ``[N, ...]`` of the shards, end to end, into the order of the batch."""
        return tokens.index_select(0, self._places.to(tokens.device))


def plan_schedule(
    lengths: Sequence[int],
    config: MegatronConfig,
    hidden: int,
    replicas: int,
    max_sequences: int | None = None,
    together: Sequence[int] | None = None,
    beginnings: Beginnings | None = None,
) -> Schedule:
    """Balance sequences over replicas by cost, and split each replica's sequences into micro-batches.

    A micro-batch has at most ``config.micro_batch_tokens`` slots; a longer sequence is a micro-batch of its own.
    Numbers of sequences of two replicas differ by one at most, and numbers of micro-batches are equal: the smallest
    possible number, and at least one for each pipeline stage if a replica has that many sequences. Sequences without a
    token are left out.

    Args:
        lengths: number of tokens of each sequence. hidden: the model's hidden size, which weighs attention against the
            rest.
        replicas: number of data-parallel replicas.
        max_sequences: most sequences that the platform's kernels take in a pack (``Platform.max_pack_sequences``).
        together: ``[B]``, sequences with the same number go to one replica, and in thd to one micro-batch, if they are
            few enough not to spoil the balance, so that the images of a prompt are seen once. Replicas then hold equal
            work rather than equal numbers.
        beginnings: common beginnings that are computed once in a micro-batch of thd. Sequences that begin alike go
            together in pieces, of the size at which the replica with most work has least, and ``together`` is ignored.

    Raises:
        ValueError: no sequence has a token.
    """
    sizes = np.asarray(lengths, dtype=np.int64)  # [B]
    nonempty = np.flatnonzero(sizes)
    if not len(nonempty):
        raise ValueError(f"batch: none of its {len(sizes)} sequences has a token that could be predicted")
    unit = compute_slot_unit(config.tp, config.cp, config.pad_to_multiple_of)
    slots = -(-sizes // unit) * unit  # [B]: tokens and padding, as a layout gives them
    # The rest of a pack of a fixed size is a sequence of its own.
    capacity = (max_sequences or len(sizes) + 1) - bool(config.slots)
    # [B]: each sequence is a bundle of its own, or shares one, and what it costs there.
    bundle, costs = np.arange(len(sizes)), estimate_costs(sizes, hidden)
    if beginnings:
        bundle, slots, costs = _cut_pieces(sizes, beginnings, config, hidden, replicas, capacity)
    elif together is not None:
        largest = min(_find_budget(config), int(slots.sum()) // (_MIN_MICRO_BATCHES * replicas * config.pp))
        bundle = _bundle(np.asarray(together), slots, largest, max_sequences)
    equal_counts = together is None and not beginnings
    shares = _split_rows(nonempty, _deal_out(bundle[nonempty], costs[nonempty], replicas, equal_counts), replicas)
    if config.layout == "bshd":
        cut, low = partial(_cut_rows, slots=slots, config=config), config.pp
    else:
        cut = partial(_cut_packs, slots=slots, bundle=bundle, budget=_find_budget(config), capacity=capacity)
        low = max(config.pp, *(_bound_count(slots[rows], _find_budget(config), capacity) for rows in shares))
    # With a sequence in each micro-batch everything fits, so the longest share bounds the count from above.
    high = max(map(len, shares))
    count = _find_fewest(lambda count: all(cut(rows, count=count) for rows in shares), min(low, high), high)
    return Schedule(tuple(tuple(cut(rows, count=count)) for rows in shares), tuple(lengths), beginnings)


def _deal_out(bundle: np.ndarray, costs: np.ndarray, parts: int, counts_matter: bool) -> np.ndarray:
    """Deal bundles out as wholes: ``[n]``, the part of each sequence, from its bundle and its cost."""
    _, number = np.unique(bundle, return_inverse=True)
    sums = np.bincount(number, weights=costs).astype(np.int64)
    return balance_costs(sums, parts, counts_matter)[number]


def _cut_pieces(
    sizes: np.ndarray, beginnings: Beginnings, config: MegatronConfig, hidden: int, replicas: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut sequences that begin alike into pieces that compute it once: ``(piece, slots, costs)``, ``[B]`` each.

    The first of a piece has the slots and the work of all its tokens, all others those of what they have not in common
    with the one before, and each a copy of its keys and values, which counts as slots. Small pieces are easy to balance
    and compute beginnings often: of some sizes, the one whose dearest replica is cheapest.
    """
    unit, budget = compute_slot_unit(config.tp, config.cp, config.pad_to_multiple_of), _find_budget(config)
    taken = sizes[beginnings.order] > 0
    rows, common = beginnings.order[taken], beginnings.common[taken]  # [n]; one without a token has none in common
    tokens = sizes[rows]
    whole, own = (-(-count // unit) * unit for count in (tokens, tokens - common))
    whole, own = (np.ceil(slots + beginnings.copied_slots * tokens).astype(np.int64) for slots in (whole, own))
    work, saved = estimate_costs(tokens, hidden), estimate_costs(common, hidden)
    starts = np.flatnonzero(common == 0)
    group = np.cumsum(common == 0) - 1  # [n]: runs of neighbours that begin alike
    own_work, once = work - saved, np.maximum.reduceat(saved, starts)
    own_work[starts] = np.maximum(own_work[starts] - once, 0)  # what the first computes for all of them is no one's own
    totals, count = np.add.reduceat(own_work, starts), np.diff(starts, append=len(rows))
    # Of each sequence, the middle of its own work in that of its group, from 0 to 1.
    middle = np.cumsum(own_work) - own_work / 2 - (np.cumsum(totals) - totals)[group]
    middle /= np.maximum(totals, 1)[group]
    best, found = np.inf, None
    for size in _PIECES:
        most = size * (once + totals).sum() / (replicas * config.pp)
        parts = np.clip(np.ceil(totals / np.maximum(most - once, 1)), 1, count)
        part = np.floor(middle * parts[group]).astype(np.int64)
        is_first = _fill_pieces(group, part, (whole, own), budget, capacity)
        piece, costs = np.cumsum(is_first), np.where(is_first, work, work - saved)
        owner = _deal_out(piece, costs, replicas, counts_matter=False)
        makespan = np.bincount(owner, weights=costs, minlength=replicas).max()
        if makespan < best:
            best, found = makespan, (piece, np.where(is_first, whole, own), costs)
    assert found is not None
    columns = np.zeros((3, len(sizes)), np.int64)
    columns[:, rows] = found
    return columns[0], columns[1], columns[2]


def _fill_pieces(
    group: np.ndarray, part: np.ndarray, slots: tuple[np.ndarray, np.ndarray], budget: int, most: int
) -> np.ndarray:
    """Fill pieces within the budget with neighbours ``[n]`` that have one group and one part of it: whether each is the
    first of its piece. ``slots`` are those of one that is first, and of one that is not."""
    is_first, used, members, last = np.ones(len(group), bool), 0, 0, None
    keys = zip(group.tolist(), part.tolist())
    for place, (key, whole, own) in enumerate(zip(keys, *(column.tolist() for column in slots))):
        if key == last and used + own <= budget and members < most:
            is_first[place] = False
            used, members = used + own, members + 1
        else:
            last, used, members = key, whole, 1
    return is_first


def _split_rows(rows: np.ndarray, owner: np.ndarray, parts: int) -> list[np.ndarray]:
    """Split rows ``[n]`` by the part ``[n]`` of each; within a part they keep their order."""
    ends = np.cumsum(np.bincount(owner, minlength=parts))  # [parts]; a part may be empty
    # A stable sort lays the parts end to end; the last end is that of all rows, where nothing is split.
    return np.split(rows[np.argsort(owner, kind="stable")], ends[:-1])


def _find_fewest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Find the smallest count from ``low`` to ``high`` that fits.

    ``fits`` must be monotone and hold for ``high``. The search begins near ``low``, where the answer nearly always is.
    """
    # First steps of 1, 2, 4, ... up; then bisection. No count below `low` fits.
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
    oversized = slots > budget  # [n] bool: a sequence with a pack of its own, over the budget
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
    """Split the sequences ``[n]`` of a replica into ``count`` packs; an empty list where they do not fit.

    With fewer sequences than packs the last packs are empty.
    """
    _, number = np.unique(bundle[rows], return_inverse=True)  # [n]: bundles of this replica, from 0 on
    sums = np.bincount(number, weights=slots[rows]).astype(np.int64)
    owner = balance_costs(sums, count, equal_counts=False)[number]
    loads, sizes = np.bincount(owner, weights=slots[rows], minlength=count), np.bincount(owner, minlength=count)
    # A sequence that is longer than the budget is allowed alone, two that are too long together are not.
    if ((loads > budget) & (sizes > 1)).any() or sizes.max() > capacity:
        return []
    return _split_rows(rows, owner, count)


def _cut_rows(rows: np.ndarray, slots: np.ndarray, config: MegatronConfig, count: int) -> list[np.ndarray]:
    """Split as ``_cut_packs``, for bshd: sequences of similar lengths go together, since each row is as wide as the
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
    """Return a number for each sequence, ``[B]``, that is equal for sequences with the same images; None without
    images.

    Each sequence without images has a number of its own.
    """
    if not batch.images or not any(batch.images):
        return None
    numbers: dict = {}
    keys = (tuple(image.digest for image in shown) or row for row, shown in enumerate(batch.images))
    return [numbers.setdefault(key, len(numbers)) for key in keys]
