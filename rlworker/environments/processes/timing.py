"""A running episode: its samples, the time that it has taken, and the line where it is.

Each step of an episode is timed, so that its limit counts its own work and waits: neither its samples and tools,
which have limits of their own, nor the steps of its neighbours.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rlworker.environments.episode import Episode
from rlworker.environments.policy import Host, Policy
from rlworker.environments.record import IDLE, Job, Sample, Segment

_OURS = str(Path(__file__).parent.parent)

ReportFn = Callable[[int, int], None]
"""Is called with number and turn of the episode that takes a step, and ``IDLE`` where none does."""


class RunningEpisode(Policy):
    """A running episode, which its environment has as its policy.

    Args:
        samples: those of the job, decoded.

    Attributes:
        known_samples, known_tools: samples and outcomes of tool calls that are there already, before the first that is
            asked for. known_segments: sequences, and segments of the last of them, that the driver knows.
        future: of the sample that it waits for.
        waits: samples and tools that it waits for. used_s: seconds that count. left_at: when its last step ended, on
            the clock of ``StepTimer``. gave_up: it asked for a sample and did not wait for it.
    """

    def __init__(self, host: Host, job: Job, samples: Iterable[tuple[int, Sample]]):
        super().__init__(host, job.number, job.seed)
        self.row, self.group, self.group_size = job.row, job.group, job.group_size
        self.known_samples, self.known_tools = deque(samples), job.tools
        self.known_segments: tuple[int, int] = 1, 1
        self.future: asyncio.Future[Sample] | None = None
        self.waits = self.tool_calls = self.tool_failures = 0
        self.used_s = self.left_at = 0.0
        self.has_ended = self.gave_up = False
        self.task: asyncio.Task | None = None
        self.coroutine: Any = None

    @property
    def turn(self) -> int:
        """Turns that it has sampled."""
        return self.episode.turns if self.episode else 0

    def find_context(self, episode: Episode) -> tuple[bool, Segment]:
        """Find what the episode's sequence has that the driver does not know, and whether that is a whole new one."""
        (sequences, known), last = self.known_segments, episode.sequences[-1]
        has_own_prompt = episode.turns == 0 and last[0].token_ids is not episode.row.prompt_ids
        is_new = len(episode.sequences) > sequences or has_own_prompt
        unknown = last if is_new else last[known:]
        parts = [np.asarray(segment.token_ids, np.int32) for segment in unknown]
        images = tuple(image for segment in unknown for image in segment.images)
        return is_new, Segment(np.concatenate(parts) if parts else (), images=images)

    def locate(self) -> list[tuple[FrameType, int]]:
        """List the frames in which it waits, outermost first, ours left out."""
        frames, coroutine = [], self.coroutine
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append((frame, frame.f_lineno))
            coroutine = coroutine.cr_await
        return [place for place in frames if not is_ours(place[0])]


class StepTimer:
    """Times the steps of a process's episodes.

    Attributes:
        step: the episode that takes a step and when that began; None between steps. The thread that watches reads it.
    """

    def __init__(self, report: ReportFn):
        self._report, self._busy_s = report, 0.0
        self.step: tuple[RunningEpisode, float] | None = None

    def take_step(self, running: RunningEpisode, act: Callable, *args: Any) -> Any:
        """Let an episode take a step, and count its time."""
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

    def begin(self, running: RunningEpisode) -> None:
        """Let the time of an episode begin."""
        running.left_at = time.monotonic() - self._busy_s

    def turn_idle(self) -> None:
        """Report that the loop turns without a step."""
        self._report(IDLE, 0)

    def is_overdue(self, running: RunningEpisode, limit_s: float) -> bool:
        """Tell whether an episode that takes no step has used up its time, awaiting neither a sample nor a tool.

        The clock stands still while any episode takes a step.
        """
        return not running.waits and running.used_s + time.monotonic() - self._busy_s - running.left_at > limit_s


class TimedCoroutine(Coroutine):
    """A coroutine of an environment, each step of which is timed."""

    def __init__(self, coroutine: Coroutine, running: RunningEpisode, timer: StepTimer):
        self._coroutine, self._running, self._timer = coroutine, running, timer

    def send(self, value: Any) -> Any:
        return self._take(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._take(self._coroutine.throw, *error)

    def _take(self, act: Callable, *args: Any) -> Any:
        try:
            return self._timer.take_step(self._running, act, *args)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop for all episodes
            raise RuntimeError(f"{type(error).__name__} in a task of the environment") from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def list_user_frames(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """List the frames from that of an episode's step to ``frame``, outermost first, ours left out."""
    frames = []
    for place in traceback.walk_stack(frame):
        if place[0].f_code is StepTimer.take_step.__code__:
            break
        frames.append(place)
    return [place for place in reversed(frames) if not is_ours(place[0])]


def is_ours(frame: FrameType) -> bool:
    """Tell the frames of this package from those of environments."""
    return frame.f_code.co_filename.startswith(_OURS)
