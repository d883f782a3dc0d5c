"""Sample requests turn by turn: all episodes wait until each has asked for its sample or ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from engines.batch.samples import Completion, Request, Sampling
from rlworker.cluster.rollout_group import Rollouts

if TYPE_CHECKING:
    from rlworker.rollouts.trajectory import Key


class TurnQueue:
    """Holds requests until no episode runs, then samples all of them at once: a barrier after each turn.

    So samples depend on the environments, the weights and the random numbers alone: not on how long a tool took, nor on
    the process in which an environment ran. One batch is open at a time. ``RequestQueue`` is the queue without the
    barrier.

    Args:
        rollouts: the vLLM engines.
    """

    runs_ahead = False
    longest_s = 0.25
    references: Sequence[Any] = ()

    def __init__(self, rollouts: Rollouts):
        self._rollouts, self.sampling_seconds = rollouts, 0.0
        self._held: list[tuple[Key, Request]] = []
        self._stream: tuple[int, ...] = ()
        self._starts_rows, self._turn = False, 0

    def reset(self, stream: tuple[int, ...]) -> None:
        self._held = []

    def open(self, sampling: Sampling, starts_rows: bool) -> None:
        """Begin a batch: draw from its random numbers from now on, with a stream of its own for each turn.

        Args:
            sampling: settings of the batch; its ``stream`` seeds the random numbers.
            starts_rows: whether the requests of the first turn are ``sampling.count`` samples of each row's prompt.
        """
        self._stream, self._starts_rows, self._turn = sampling.stream, starts_rows, 0

    def submit(self, requests: Iterable[tuple[Key, Request]]) -> None:
        self._held += requests

    def abort(self, keys: Iterable[Key]) -> None:
        gone = set(keys)
        self._held = [one for one in self._held if one[0] not in gone]

    def collect(self, is_idle: bool) -> list[tuple[Key, list[Completion]]]:
        """Sample all held requests, in order of their keys, if no episode runs (``is_idle``); else return none."""
        if not (is_idle and self._held):
            return []
        held, self._held = sorted(self._held, key=lambda one: one[0]), []
        requests = [request for _, request in held]
        stream = self._stream if self._starts_rows and not self._turn else (*self._stream, self._turn)
        start = time.perf_counter()
        completions, self._turn = iter(self._rollouts.sample(requests, stream)), self._turn + 1
        self.sampling_seconds += time.perf_counter() - start
        return [(key, list(islice(completions, request.sampling.count))) for key, request in held]

    def parse_tools(
        self, texts: Sequence[str], parser: str, tools: list, then: Callable[[Any], None], otherwise: Callable[[], None]
    ) -> None:
        then(self._rollouts.parse_tools(texts, parser, tools))

    def list_lost(self) -> dict[int, RayError]:
        return {}  # engines that are lost meanwhile are replaced, and asked again
