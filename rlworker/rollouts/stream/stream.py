"""The stream of draws: one thread feeds the engines, takes what they answer, and makes groups of it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

import ray

from engines.batch.samples import Completions, Prompt, Request, Sampling
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.watch import wait_until
from rlworker.data.rows import Row
from rlworker.rewards.pool import RewardPool, Scores, join_scores
from rlworker.rollouts.plays import Player
from rlworker.rollouts.stream.draw import Draw, Drawer, Finished
from rlworker.rollouts.stream.feed import Feed
from rlworker.rollouts.stream.plays import EpisodeDrawer
from rlworker.rollouts.stream.prompts import PromptDrawer

_TICK_S = 0.02
"""Seconds between two looks at what comes from this process itself."""


class _Canary:
    """Draws one completion for each row, row ``i`` with engine ``i % engines``, and scores none."""

    def __init__(self, feed: Feed, engines: int):
        self._feed, self._engines = feed, engines
        self._found: list[Finished] = []

    def begin(self, draw: Draw) -> None:
        sampling = draw.sampling
        for place, row in enumerate(draw.rows):
            settings = sampling.temperature, sampling.max_tokens, sampling.stop_token_ids
            prompt, scores = Prompt(row.prompt_ids, row.images), sampling.scores_prompt
            request = Request(prompt, *settings, goes_first=True, scores_prompt=scores)
            self._feed.submit_to(place % self._engines, [((draw.number, place), request)])

    def take(self, draw: Draw, key: tuple, completions: Completions) -> None:
        self._found.append((draw, key[1], completions))

    def advance(self) -> list[Finished]:
        found, self._found = self._found, []
        return found

    references: Sequence[Any] = ()

    def forget(self) -> None:
        self._found = []

    def close(self) -> None:
        pass


class Stream:
    """Draws groups beside whatever the trainer does, in a thread of its own; the driver's own thread waits for them.

    As a context manager it ends with the run, before the engines do.

    Args:
        scorer: rewards completions, or plays episodes.
        seeds: names the random numbers.
    """

    def __init__(self, rollouts: Rollouts, scorer: RewardPool | Player, tokenizer: Any, seeds: tuple[int, ...]):
        self._rollouts, self._changed = rollouts, threading.Condition()
        self._feed = feed = Feed(rollouts, seeds)
        plays = isinstance(scorer, Player)
        self._drawer: Drawer = EpisodeDrawer(feed, scorer) if plays else PromptDrawer(feed, tokenizer, scorer)
        self._canary = _Canary(feed, len(rollouts.workers))
        self._draws: dict[int, tuple[Draw, Drawer]] = {}
        self._numbers, self._calls = count(), SimpleQueue()
        self._fault: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def begin(self, rows: Sequence[Row], sampling: Sampling, goes_first: bool = False) -> Draw:
        """Begin to draw the groups of some rows.

        Args:
            goes_first: before all that has not begun.
        """
        return self._begin(self._drawer, Draw(next(self._numbers), rows, sampling, goes_first))

    def wait(self, draw: Draw) -> tuple[list, Scores]:
        """Wait until a draw is whole: its groups, and how some rewards failed. Lost engines are replaced meanwhile.

        Raises:
            Exception: whatever the thread ended by.
        """
        wait_until(lambda slice_s: self._wait(draw, slice_s))
        rewards = [reward for group in draw.groups for reward in group.rewards]
        return draw.groups, replace(join_scores(draw.scores), values=rewards)  # parts come in any order

    def sample_each(self, rows: Sequence[Row], sampling: Sampling) -> Completions:
        """Sample one completion of each row, row ``i`` by engine ``i % engines``, before all that has not begun."""
        draw = self._begin(self._canary, Draw(next(self._numbers), rows, sampling, True))
        wait_until(lambda slice_s: self._wait(draw, slice_s))
        return Completions.concatenate(draw.groups)

    def forget(self, seeds: tuple[int, ...]) -> None:
        """Forget all draws and go on with other random numbers, as a run does that goes back to a checkpoint."""
        self._call(lambda: self._forget(seeds)).result()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self._closed = True
        self._thread.join()

    def _begin(self, drawer: Drawer, draw: Draw) -> Draw:
        self._call(lambda: self._open(drawer, draw))
        return draw

    def _call(self, function: Callable[[], None]) -> Future:
        """Have the thread call a function, between two of its turns."""
        future: Future = Future()
        with self._changed:
            self._check_alive()
            self._calls.put((function, future))
        return future

    def _check_alive(self) -> None:
        if self._fault:
            raise self._fault

    def _wait(self, draw: Draw, slice_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: draw.is_done or self._fault or self._feed.list_lost(), slice_s)
        self._check_alive()
        if lost := self._feed.list_lost():
            self._rollouts.replace_or_raise(lost)
        return draw.is_done

    # -- on the stream's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_turn()
        except BaseException as error:  # whoever waits is told
            self._fault = error
        finally:
            self._drawer.close()
            with self._changed:
                self._fault = self._fault or RuntimeError("rollout: the stream was closed")
                while not self._calls.empty():
                    self._calls.get()[1].set_exception(self._fault)
                self._changed.notify_all()

    def _take_turn(self) -> None:
        while not self._calls.empty():
            function, future = self._calls.get()
            try:
                function()
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(None)
        for key, completions in self._feed.collect():
            draw, drawer = self._draws[key[0]]
            drawer.take(draw, key, completions)
        drawers = self._drawer, self._canary
        finished = [one for drawer in drawers for one in drawer.advance()]
        if finished or self._feed.list_lost():
            self._tell(finished)
        if waited := [*self._feed.references, *self._drawer.references]:
            ray.wait(waited, timeout=_TICK_S)
        elif self._calls.empty():
            threading.Event().wait(_TICK_S)

    def _tell(self, finished: Sequence[Finished]) -> None:
        with self._changed:
            for draw, place, group in finished:
                draw.add(place, group)
                if draw.is_done:
                    del self._draws[draw.number]
            self._changed.notify_all()

    def _open(self, drawer: Drawer, draw: Draw) -> None:
        self._draws[draw.number] = draw, drawer
        drawer.begin(draw)

    def _forget(self, seeds: tuple[int, ...]) -> None:
        for draw, _ in self._draws.values():
            draw.is_forgotten = True
        self._draws.clear()
        self._drawer.forget()
        self._canary.forget()
        self._feed.begin(seeds)
