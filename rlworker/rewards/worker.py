"""The process that calls the reward function, and what it writes of it.

Importing this takes neither torch nor an engine: a worker that takes the place of another should start at once.
"""

import json
import reprlib
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise, repeat, takewhile
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import numpy as np
from ray import cloudpickle

from rlworker.config.sections import LARGEST_REWARD
from rlworker.data.rows import Row
from rlworker.rewards.functions import read_number
from rlworker.rewards.user_code import INTERRUPT, Interrupt, describe_error, locate, write_output_to

FailureKind = Literal["timeout", "raised", "not_a_number", "too_large", "wrong_count", "died"]
"""Why a text got no reward; ``too_large`` is a number beyond ``LARGEST_REWARD``, ``wrong_count`` a call that returned
too many or too few numbers, and ``died`` a process that did."""
Outcome = float | tuple[FailureKind, str]
"""A reward, or the kind of a failure and what happened."""


class RewardWorker:
    """The process that calls the reward function.

    Ray runs a worker's methods in the main thread, which is where Python handles signals.

    Args:
        output: the file at whose end what the function prints and logs goes; None leaves it to Ray.
        folder: of this node's ``ProgressFiles``.
    """

    def __init__(self, reward: bytes, batch: bool, time_limit_s: float, output: Path | None, folder: str):
        if output:  # before the function is loaded, whose modules may print as well
            write_output_to(output)
        self.reward, self.batch, self.limit = cloudpickle.loads(reward), batch, time_limit_s
        self.folder = folder
        self._began: float | None = None  # when the call that runs now began
        self._interrupted = ""
        signal.signal(INTERRUPT, self._interrupt)
        threading.Thread(target=self._watch, daemon=True).start()

    def score(self, job: bytes, part: int) -> None:
        """Score the texts of a part into its files (see ``progress.ProgressFiles``).

        Args:
            job: pickled texts ``[N]``, row numbers ``[N]`` and rows by number.
        """
        texts, index, rows = cloudpickle.loads(job)
        path, scored = f"{self.folder}/{part}", 0
        with open(name_failures_file(path), "w", encoding="utf-8") as failures:
            # Last, since the part has begun once it is there.
            file = np.memmap(path, np.float64, "w+", shape=(1 + len(texts),))
            numbers = cast("memoryview[float]", file.data)
            for count, text, row in self._iterate_calls(texts, index, rows):
                for place, outcome in enumerate(self._call(text, row, count), scored):
                    if isinstance(outcome, tuple):
                        failures.write(json.dumps([place, *outcome]) + "\n")
                        failures.flush()
                    else:
                        numbers[1 + place] = outcome
                scored += count
                numbers[0] = scored

    def _iterate_calls(self, texts: list[str], index: list[int], rows: dict[int, Row]) -> Iterator[tuple]:
        """Number of texts and arguments of each call."""
        if not self.batch:
            return zip(repeat(1), texts, map(rows.__getitem__, index))
        bounds = list(pairwise(find_call_bounds(index, batch=True)))
        return ((b - a, texts[a:b], [rows[i] for i in index[a:b]]) for a, b in bounds)

    def _call(self, text: str | list[str], row: Row | list[Row], count: int) -> list[Outcome]:
        """Make one call of the reward function."""
        self._interrupted = ""
        try:
            try:
                self._began = time.monotonic()
                outcomes = _read_outcomes(self.reward(text, row), count)
            finally:
                self._began = None
        except BaseException as error:  # sys.exit() too is only this call's outcome
            outcomes: list[Outcome] = [("raised", describe_error(error))] * count
        if self._interrupted:  # whatever the function made of it
            outcomes = [("timeout", f"no end after {self.limit:g} s, {self._interrupted}")] * count
        return outcomes

    def _watch(self) -> None:
        """Interrupt the main thread when its call is overdue."""
        main, tick = threading.main_thread().ident or 0, min(self.limit / 20, 0.1)
        while True:
            time.sleep(tick)
            if self._is_overdue():
                signal.pthread_kill(main, INTERRUPT)

    def _is_overdue(self) -> bool:
        start_time = self._began
        return start_time is not None and time.monotonic() - start_time >= self.limit

    def _interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_overdue():  # the call that the signal was meant for may have ended in between
            self._began = None
            ours = RewardWorker._call.__code__
            outward = list(takewhile(lambda place: place[0].f_code is not ours, traceback.walk_stack(frame)))
            self._interrupted = locate(outward[::-1])
            raise Interrupt


def name_failures_file(path: str) -> str:
    """Name the file of the failures that belong to the numbers at ``path``."""
    return f"{path}.failures"


def find_call_bounds(index: list[int], batch: bool) -> list[int]:
    """Find where calls begin among texts of rows ``index [N]``: at every text, or where the row changes; then ``N``."""
    starts = [i for i, row in enumerate(index) if i == 0 or row != index[i - 1]] if batch else range(len(index))
    return [*starts, len(index)]


def _read_outcomes(returned: Any, count: int) -> list[Outcome]:
    """Read what a call for ``count`` texts returned as one outcome per text."""
    if type(returned) is float and count == 1 and abs(returned) <= LARGEST_REWARD:  # nearly always
        return [returned]
    try:
        values = [returned] if isinstance(returned, (str, bytes, dict)) else list(cast(Any, returned))
    except TypeError:  # a number
        values = [returned]
    if len(values) != count:
        message = f"returned {len(values)} numbers for {count} texts: {reprlib.repr(returned)}"
        return [("wrong_count", message)] * count
    return [_read_outcome(value) for value in values]


def _read_outcome(value: Any) -> Outcome:
    number = read_number(value)
    if abs(number) <= LARGEST_REWARD:
        return number
    return ("too_large" if isfinite(number) else "not_a_number"), f"returned {reprlib.repr(value)}"
