"""Find the first difference between two computations of a step that is more than rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlworker.tracking.capsule.files import SLOPE, Update, list_places

_FACTOR = 4.0
"""Most that a place may be apart, as a multiple of what rounding moves any place of the stage by."""
_LEAST = 2.0**-21
"""Relative difference of a derivative that single precision alone may have."""
_HINTS = {
    "embeddings": "ids, the embedding's weight, features of images",
    "last norm": "the last norm",
    "entropy": "the head's weight, the temperature, or the ids that may be sampled",
    "logprobs": "the targets",
    "values": "the critic's head",
}
_LOSS_HINT = "the loss, its settings, or the columns that it reads: advantages, weights, logprobs"


@dataclass(frozen=True)
class Stage:
    """A stage of the computation, compared at all of its places.

    Attributes:
        name: "embeddings", "layer 3", "last norm", an output, or the loss's derivative by one.
        places: sequence and position of each place, ``[P, 2]``. span: number of successive tokens of a place.
        apart: difference of each place, ``[P]``. limit: most that rounding may make of it.
        same: whether each place has the same bits, ``[P]``.
    """

    name: str
    places: np.ndarray
    span: int
    apart: np.ndarray
    limit: float
    same: np.ndarray

    @cached_property
    def over(self) -> np.ndarray:
        """Mark the places that are apart by more than rounding, ``[P]``; NaN is."""
        return ~self.same & ~(self.apart <= self.limit)

    @property
    def share(self) -> float:
        """The largest difference as a share of the limit."""
        largest = float(np.max(np.where(self.same, 0.0, self.apart), initial=0.0))
        return largest / self.limit if self.limit else (np.inf if largest else 0.0)

    @property
    def hint(self) -> str:
        """Say what computes the stage."""
        return _LOSS_HINT if self.name.startswith(SLOPE) else _HINTS.get(self.name, f"{self.name}'s own computation")


@dataclass(frozen=True)
class Difference:
    """The first place of a micro-batch that differs, in its first stage that does.

    Attributes:
        replica, micro_batch: numbers by the schedule. stage: the stage.
        place: number of the place in the stage.
    """

    replica: int
    micro_batch: int
    stage: Stage
    place: int

    def name_place(self) -> str:
        """Name the micro-batch, the stage and the place."""
        sequence, position = self.stage.places[self.place].tolist()
        where = f"replica {self.replica}, micro-batch {self.micro_batch}, {self.stage.name}, sequence {sequence}"
        last = f" to {position + self.stage.span - 1}" if self.stage.span > 1 else ""
        return f"{where}, position {position}{last}"

    def describe(self, update: Update) -> str:
        """Describe where it is, and by how much the place is apart."""
        stage, (sequence, position) = self.stage, self.stage.places[self.place].tolist()
        start = sum(update.batch.lengths[:sequence]) + position
        token = int((update.batch.targets if stage.name in update.columns else update.batch.inputs)[start])
        block = update.batch.image_block
        image = "" if block is None or int(block[start]) < 0 else f", image {int(block[start])}"
        count = int(stage.over.sum())
        return (
            f"{self.name_place()} (id {token}{image}): apart by {stage.apart[self.place]:.1e}, limit "
            f"{stage.limit:.1e}, at {count} of {len(stage.over)} places; look at {stage.hint}"
        )


def measure_states(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Estimate from sketches ``[..., k + 1]`` how far states are apart, relative to the norm of ``a``'s: ``[...]``."""
    apart = (a - b).astype(np.float64)
    projected, norm = np.sqrt(np.mean(apart[..., :-1] ** 2, axis=-1)), np.abs(apart[..., -1])
    return np.maximum(projected, norm) / np.maximum(a[..., -1], np.finfo(np.float32).tiny)


def measure_rounding(update: Update, rounded: Sequence[Update]) -> dict[str, float]:
    """Measure how far rounding moves the places of each stage, at most: stage -> difference.

    Args:
        rounded: the update computed again, rounded otherwise.
    """
    moved = {
        name: max(float(measure_states(update.values[number], one.values[number]).max()) for one in rounded)
        for number, name in enumerate(update.stages)
    }
    return moved | {
        name: max(float(np.abs(column - one.columns[name]).max(initial=0.0)) for one in rounded)
        for name, column in update.columns.items()
    }


def compare_updates(before: Update, now: Update) -> list[Stage]:
    """Compare two computations of an optimizer step, stage by stage in the order of the computation.

    The lesser rounding of the two counts: that of a computation which is wrong may be larger.
    """
    limits = {name: _FACTOR * min(moved, now.rounding[name]) for name, moved in before.rounding.items()}
    stages, places = [], list_places(before.batch.lengths)
    for number, (name, states) in enumerate(zip(before.stages, before.values, strict=True)):
        apart, same = measure_states(states, now.values[number]), before.bits[number] == now.bits[number]
        stages.append(Stage(name, before.places, before.span, apart, limits[name], same))
    # A wrong distribution shows in entropies, a wrong target in logprobs alone; derivatives come after both.
    for name in sorted(before.columns, key=lambda name: (name.startswith(SLOPE), name)):
        own, other = before.columns[name], now.columns[name]
        least = _LEAST * float(np.abs(own).max(initial=0.0)) if name.startswith(SLOPE) else 0.0
        same = (own == other) | (np.isnan(own) & np.isnan(other))
        stages.append(Stage(name, places, 1, np.abs(own - other), max(limits[name], least), same))
    return stages


def compute_norm_limit(before: Update, now: Update) -> float:
    """Return the largest relative difference of gradient norms that rounding makes: a gradient is taken to be rounded
    as the states are that it is computed from."""
    return _FACTOR * max(min(before.rounding[name], now.rounding[name]) for name in before.stages)


def find_first(
    stages: Sequence[Stage], rows: Sequence[Sequence[Sequence[int]]], bits: bool = False
) -> Difference | None:
    """Find the first micro-batch with a difference, in it the first stage, and in that the first place.

    Args:
        rows: as in ``Update``. bits: look for places with other bits, in place of those that rounding does not explain.
    """
    wrong = [~stage.same if bits else stage.over for stage in stages]
    if not any(each.any() for each in wrong):
        return None
    for replica, number, members in _list_micro_batches(rows):
        for stage, each in zip(stages, wrong, strict=True):
            for row in members:
                found = np.flatnonzero(each & (stage.places[:, 0] == row))
                if len(found):
                    return Difference(replica, number, stage, int(found[0]))
    raise AssertionError("a place is of no micro-batch")


def _list_micro_batches(rows: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, int, Sequence[int]]]:
    """List micro-batches in the order in which they are computed: replica, number, and sequences."""
    for number in range(max(map(len, rows))):
        for replica, of_replica in enumerate(rows):
            if number < len(of_replica):
                yield replica, number, of_replica[number]


def compare_schedules(before: Update, now: Update) -> str:
    """Describe the first micro-batch that has other sequences; empty where the schedules are equal."""
    for (replica, number, own), (_, _, other) in zip(
        _list_micro_batches(before.rows), _list_micro_batches(now.rows), strict=False
    ):
        if own != other:
            place = next(i for i, (a, b) in enumerate(zip([*own, -1], [*other, -1], strict=False)) if a != b)
            return (
                f"replica {replica}, micro-batch {number} differs from place {place} on: it has sequences {other}, the "
                f"capsule's {own}"
            )
    return "" if before.digest == now.digest else "sequences are the same; what they share at their beginning is not"
