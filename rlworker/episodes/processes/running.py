"""A play that runs: what it waits for, the time that it has taken, and the line where it is.

Each step of a play is timed, so that its limit counts what it did and waited for itself: neither its samples and tools,
which have limits of their own, nor the steps of its neighbours.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from rlworker.data.rows import Row
from rlworker.episodes.episode import Episode
from rlworker.episodes.model import Host, Model
from rlworker.episodes.record import IDLE, Answer, Job, Piece

_OURS = str(Path(__file__).parent.parent)

ReportFn = Callable[[int, int], None]
"""Is told the number and turn of the play that takes a step, and ``IDLE`` when the loop turns without one."""


class RunningPlay:
    """A play that runs.

    Attributes:
        answers: those to be given again, before the first that is asked for. tools: outcomes of tools, likewise.
        told: sequences, and pieces of the last of them, that the driver knows. future: of the sample that it waits for.
        waits: samples and tools that it waits for. used_s: seconds that count. left_at: when its last step ended, on
            the clock of ``StepTimer``. gave_up: it asked for a sample and did not wait for it.
    """

    def __init__(self, job: Job, row: Row, host: Host):
        self.number, self.row, self.model = job.number, row, Model(host, job.number, job.seed)
        self.answers, self.tools = deque(job.answers), job.tools
        self.told = 1, 1
        self.future: asyncio.Future[tuple[Answer, str]] | None = None
        self.waits = self.tool_calls = self.tool_failures = 0
        self.used_s = self.left_at = 0.0
        self.has_ended = self.gave_up = False
        self.task: asyncio.Task | None = None
        self.coroutine: Any = None

    @property
    def turn(self) -> int:
        """Turns that it has sampled."""
        return self.model.episode.turns if self.model.episode else 0

    def find_context(self, episode: Episode) -> tuple[bool, list[Piece]]:
        """Find what the episode's sequence has that the driver does not know, and whether that is a whole new one."""
        sequences, pieces = self.told
        last = episode.sequences[-1]
        has_own_prompt = episode.turns == 0 and last[0].token_ids is not episode.row.prompt_ids
        if len(episode.sequences) > sequences or has_own_prompt:
            return True, last
        return False, last[pieces:]

    def note_context(self, episode: Episode) -> None:
        """Take note that the driver knows all of the episode."""
        self.told = len(episode.sequences), len(episode.sequences[-1])

    def locate(self) -> list[tuple[FrameType, int]]:
        """List the frames in which it waits, outermost first, ours left out."""
        frames, coroutine = [], self.coroutine
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append((frame, frame.f_lineno))
            coroutine = coroutine.cr_await
        return [place for place in frames if not is_ours(place[0])]


class StepTimer:
    """Times the steps of the plays of a process.

    Attributes:
        step: the play that takes a step and when that began; None between steps. The thread that watches reads it.
    """

    def __init__(self, report: ReportFn):
        self._report, self._busy_s = report, 0.0
        self.step: tuple[RunningPlay, float] | None = None

    def take_step(self, running: RunningPlay, act: Callable, *args: Any) -> Any:
        """Let a play take a step, and count its time."""
        began = time.monotonic()
        if not running.waits:
            running.used_s += began - self._busy_s - running.left_at
        self._report(running.number, running.turn)
        self.step = running, began
        try:
            return act(*args)
        finally:
            self.step = None
            end = time.monotonic()
            self._busy_s += end - began
            running.used_s += end - began
            running.left_at = end - self._busy_s

    def begin(self, running: RunningPlay) -> None:
        """Let the time of a play begin."""
        running.left_at = time.monotonic() - self._busy_s

    def turn_idle(self) -> None:
        """Report that the loop turns without a step."""
        self._report(IDLE, 0)

    def is_overdue(self, running: RunningPlay, limit_s: float) -> bool:
        """Tell whether a play that takes no step has used up its time, awaiting neither a sample nor a tool.

        The clock stands still while any play takes a step.
        """
        return not running.waits and running.used_s + time.monotonic() - self._busy_s - running.left_at > limit_s


class TimedCoroutine(Coroutine):
    """A coroutine of a play, each step of which is timed."""

    def __init__(self, coroutine: Coroutine, running: RunningPlay, timer: StepTimer):
        self._coroutine, self._running, self._timer = coroutine, running, timer

    def send(self, value: Any) -> Any:
        return self._take(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._take(self._coroutine.throw, *error)

    def _take(self, act: Callable, *args: Any) -> Any:
        try:
            return self._timer.take_step(self._running, act, *args)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop for all plays
            raise RuntimeError(f"{type(error).__name__} in a task of the play") from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def list_user_frames(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """List the frames from that of a play's step to ``frame``, outermost first, ours left out."""
    frames = []
    for place in traceback.walk_stack(frame):
        if place[0].f_code is StepTimer.take_step.__code__:
            break
        frames.append(place)
    return [place for place in reversed(frames) if not is_ours(place[0])]


def is_ours(frame: FrameType) -> bool:
    """Tell the frames of this room from those of plays."""
    return frame.f_code.co_filename.startswith(_OURS)


def locate_play(play: Any) -> str:
    """Name the file and line where a play begins."""
    code = getattr(inspect.unwrap(play), "__code__", None)
    return f"at {code.co_filename}:{code.co_firstlineno}" if code else f"in {play!r}"
