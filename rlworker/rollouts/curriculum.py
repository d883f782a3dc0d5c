"""The curriculum chooses the prompts of a rollout: by the weights of sources, by difficulty and by pass rate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlworker.config.run import RunConfig
from rlworker.data.rows import Row
from rlworker.environments.record import is_pass

RETURNS_AFTER = 3
"""Times that a prompt outside the range of pass rates is passed over before it is drawn once more: the model may have
changed."""
WINDOW = 64
"""Number of prompts of the hardest open bucket whose mean pass rate decides whether the next bucket opens."""
_NEWEST_SHARE = 0.5
"""Weight of the newest pass rate in a prompt's running mean."""
_STRETCH = 4096
"""Places of an order that are looked at together."""


@dataclass
class _Queue:
    """A place in the random order of a source's rows, one for each bucket; the order changes with the epoch."""

    rows: np.ndarray
    epoch: int = 0
    place: int = 0


class Curriculum:
    """Picks the prompts of rollouts.

    A pick chooses a source, then a bucket of difficulty, then the next row of both in a random order. Sources take
    turns by weight, and so do the buckets of a source: after any number of picks each has had its share but for a few
    prompts. Where difficulty is 1 - pass rate, a row without a pass rate belongs to every bucket.

    The picks follow from the settings and the state alone. The state is JSON: a checkpoint holds it, and the picks of
    rollouts that were planned and not yet learned from.

    Args:
        config: settings of the run.
        rows: rows of all sources, one source after another.
        sizes: number of rows of each source, in the order of ``CurriculumConfig.weigh_sources``.

    Raises:
        ValueError: a row has no difficulty, or one beyond the last bucket.
    """

    def __init__(self, config: RunConfig, rows: Sequence[Row], sizes: Sequence[int]):
        self.config, self.seed, self.pass_reward = config.curriculum, config.seed, config.environment.pass_reward
        sources = self.config.weigh_sources(config.data.train)
        stems = [Path(path).stem for path in sources]
        names = stems if len(set(stems)) == len(stems) else sources
        self.names, self.weights = [name.replace("/", ":") for name in names], list(sources.values())
        self.bounds = np.asarray([*self.config.buckets] or [np.inf])
        self.bucket_weights = [*self.config.buckets.values()] or [1.0]
        self.source = np.repeat(np.arange(len(sizes)), sizes)
        self.fixed_buckets = self._read_buckets(rows) if self.config.difficulty_field else None
        ends = np.cumsum([0, *sizes])
        self.spans = [np.arange(start, end) for start, end in zip(ends, ends[1:])]
        self._clear()

    def _clear(self) -> None:
        count, buckets = len(self.source), len(self.bucket_weights)
        self.rates = np.full(count, np.nan)
        self.passed_over = np.zeros(count, np.int32)
        self.open_buckets = 1 if self.config.advance_at else buckets
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.source_credits = [0.0] * len(self.spans)
        self.bucket_credits = [[0.0] * buckets for _ in self.spans]
        sources = range(len(self.spans))
        self.queues = [[_Queue(self._shuffle(source, number, 0)) for number in range(buckets)] for source in sources]
        self.picks: dict[int, list[int]] = {}
        self.noted: list[tuple[int, float]] = []

    def _read_buckets(self, rows: Sequence[Row]) -> np.ndarray:
        """Read the bucket of each row, ``[n]``."""
        field, values = self.config.difficulty_field, []
        for row in rows:
            value = row.source.get(field)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value > self.bounds[-1]:
                raise ValueError(
                    f"curriculum: the row of prompt {row.prompt[:80]!r} has {value!r} "
                    f'in the field "{field}", expected a number, at most {self.bounds[-1]:g}, the bound of '
                    "the last bucket; change the row, --curriculum.difficulty-field or --curriculum.buckets"
                )
            values.append(value)
        return np.searchsorted(self.bounds, values)

    def describe(self) -> str:
        """Describe the sources and buckets: "a 200 rows 50 %, b 40 rows 50 %; buckets up to 1 25 %, up to 2 75 %;
        ..."."""
        spell = lambda weight, weights: f"{100 * weight / sum(weights):.3g} %"  # noqa: E731
        sources = zip(self.names, self.spans, self.weights)
        text = ", ".join(f"{name} {len(rows)} rows {spell(own, self.weights)}" for name, rows, own in sources)
        if self.config.buckets:
            buckets = self.config.buckets.items()
            text += f"; buckets {', '.join(f'up to {end:g} {spell(own, self.bucket_weights)}' for end, own in buckets)}"
        low, high = self.config.pass_rates
        return f"{text}; pass rates from {low:g} to {high:g}"

    # -- picks

    def pick(self, draw: int, count: int) -> list[int]:
        """Pick ``count`` rows for rollout number ``draw``, and return their numbers; a second call returns the same
        rows.

        Call it for rollouts in their order.
        """
        if draw not in self.picks:
            taken = np.zeros(len(self.source), bool)
            free = self._count_free(taken)
            self.picks[draw] = [self._pick_row(taken, free) for _ in range(count)]
        return self.picks[draw]

    def forget_before(self, draw: int) -> None:
        """Forget the picks of all rollouts before number ``draw``."""
        self.picks = {number: rows for number, rows in self.picks.items() if number >= draw}

    def _pick_row(self, taken: np.ndarray, free: np.ndarray) -> int:
        """Pick a row that the rollout has not ``taken`` ``[n]``, and take it.

        Args:
            free: number of rows that are not taken, ``[sources, buckets]``.
        """
        chances = self._weigh(free)
        if not chances.any():  # the rollout has every row: some are drawn twice
            taken[:] = False
            free[:] = self._count_free(taken)
            chances = self._weigh(free)
        weights = [weight * bool(of_source.any()) for weight, of_source in zip(self.weights, chances)]
        source = _take_turn(self.source_credits, weights)
        bucket = _take_turn(self.bucket_credits[source], chances[source].tolist())
        row = self._find_next(source, bucket, taken)
        taken[row] = True
        free[source] -= self._find_members(np.asarray([row]))[0]
        return row

    def _weigh(self, free: np.ndarray) -> np.ndarray:
        """Weigh the buckets of each source, ``[sources, buckets]``: 0 where one is closed, has no row that is free, or
        the source has no weight."""
        weights = np.asarray(self.bucket_weights) * (np.arange(len(self.bucket_weights)) < self.open_buckets)
        return weights * (free > 0) * (np.asarray(self.weights)[:, None] > 0)

    def _count_free(self, taken: np.ndarray) -> np.ndarray:
        counts = np.zeros((len(self.spans), len(self.bucket_weights)), np.int64)
        members = self._find_members(np.arange(len(taken)))
        np.add.at(counts, self.source, members & ~taken[:, None])
        return counts

    def _find_members(self, rows: np.ndarray) -> np.ndarray:
        """Find the buckets that rows belong to, ``[rows, buckets]`` bool."""
        numbers = np.arange(len(self.bucket_weights))
        if self.fixed_buckets is not None:
            return self.fixed_buckets[rows, None] == numbers
        rates = self.rates[rows, None]
        # A difficulty on a bound is of the bucket below, and 1 - 7 / 10 is above 0.3 by rounding.
        return np.isnan(rates) | (np.searchsorted(self.bounds, 1 - rates - 1e-9) == numbers)

    def _find_next(self, source: int, bucket: int, taken: np.ndarray) -> int:
        """Find the next row of a source and bucket; those left out that come before it are passed over."""
        queue, (low, high) = self.queues[source][bucket], self.config.pass_rates
        while True:
            rows = queue.rows[queue.place : queue.place + _STRETCH]
            due = self._find_members(rows)[:, bucket] & ~taken[rows]
            left_out = (self.rates[rows] < low) | (self.rates[rows] > high)  # a row without a rate is neither
            kept = due & (~left_out | (self.passed_over[rows] >= RETURNS_AFTER))
            first = int(kept.argmax()) if kept.any() else len(rows)
            self.passed_over[rows[:first][due[:first]]] += 1
            queue.place += first
            if first < len(rows):
                queue.place += 1
                self.passed_over[rows[first]] = 0
                return int(rows[first])
            if queue.place == len(queue.rows):
                queue.epoch, queue.place = queue.epoch + 1, 0
                queue.rows = self._shuffle(source, bucket, queue.epoch)

    def _shuffle(self, source: int, bucket: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch, source, bucket]).permutation(self.spans[source])

    # -- what was learned from

    def note(self, draw: int, rewards: Sequence[Sequence[float]]) -> None:
        """Record the rewards ``[P][G]`` of rollout ``draw``, in the order of its picks, and update pass rates."""
        for row, own in zip(self.picks[draw], rewards, strict=True):
            rate = sum(is_pass(reward, self.pass_reward) for reward in own) / len(own)
            known = self.rates[row]
            self.rates[row] = rate if np.isnan(known) else known + _NEWEST_SHARE * (rate - known)
            self.noted.append((row, rate))
            if self.fixed_buckets is not None and self.fixed_buckets[row] == self.open_buckets - 1:
                self.window.append(rate)
        is_full = len(self.window) == WINDOW and sum(self.window) / WINDOW >= self.config.advance_at
        if is_full and self.open_buckets < len(self.bucket_weights):
            self.open_buckets += 1
            self.window.clear()

    def measure(self) -> dict[str, float]:
        """Compute metrics: share and pass rate of sources and buckets since the last call, and share left out."""
        noted, self.noted = self.noted, []
        rows, rates = np.asarray([row for row, _ in noted], np.int64), np.asarray([rate for _, rate in noted])
        known = ~np.isnan(self.rates)
        metrics = {"curriculum/seen": float(known.mean())}
        low, high = self.config.pass_rates
        if (low, high) != (0, 1):
            metrics["curriculum/too_hard"] = float((self.rates < low).mean())
            metrics["curriculum/too_easy"] = float((self.rates > high).mean())
        if self.config.advance_at:
            metrics["curriculum/open_buckets"] = self.open_buckets
        for name, members in self._list_parts(rows):
            metrics[f"curriculum/{name}/share"] = float(members.mean()) if len(members) else 0.0
            if members.any():
                metrics[f"curriculum/{name}/pass_rate"] = float(rates[members].mean())
        return metrics

    def _list_parts(self, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """List each source and bucket by its name, with its members among some rows, where there are several."""
        if len(self.names) > 1:
            yield from ((name, self.source[rows] == source) for source, name in enumerate(self.names))
        if len(self.bucket_weights) > 1:
            members = self._find_members(rows)
            yield from ((f"bucket_{number + 1}", members[:, number]) for number in range(members.shape[1]))

    # -- checkpoints

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain Python values."""
        rows = np.flatnonzero(~np.isnan(self.rates))
        return {
            "rows": rows.tolist(),
            "rates": self.rates[rows].tolist(),
            "passed_over": self.passed_over[rows].tolist(),
            "open_buckets": self.open_buckets,
            "window": list(self.window),
            "source_credits": list(self.source_credits),
            "bucket_credits": [list(credits) for credits in self.bucket_credits],
            "queues": [[[queue.epoch, queue.place] for queue in queues] for queues in self.queues],
            "picks": [[draw, rows] for draw, rows in self.picks.items()],
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore a state from ``get_state``; None begins anew."""
        self._clear()
        if state is None:
            return
        rows = np.asarray(state["rows"], np.int64)
        self.rates[rows], self.passed_over[rows] = state["rates"], state["passed_over"]
        self.open_buckets = state["open_buckets"]
        self.window.extend(state["window"])
        self.source_credits = list(state["source_credits"])  # a copy: a run may return to this state again
        self.bucket_credits = [list(credits) for credits in state["bucket_credits"]]
        for source, queues in enumerate(state["queues"]):
            for bucket, (epoch, place) in enumerate(queues):
                self.queues[source][bucket] = _Queue(self._shuffle(source, bucket, epoch), epoch, place)
        self.picks = {draw: list(rows) for draw, rows in state["picks"]}


def _take_turn(credits: list[float], weights: Sequence[float]) -> int:
    """Choose whose turn it is, and keep the credits that make the turns follow the weights: everyone earns his share of
    a turn, and who has most pays for one (smooth weighted round robin). Weights 3 and 1 take turns as 0 0 1 0."""
    total = sum(weights)
    for number, weight in enumerate(weights):
        credits[number] += weight / total
    chosen = max((number for number, weight in enumerate(weights) if weight), key=credits.__getitem__)
    credits[chosen] -= 1.0
    return chosen
