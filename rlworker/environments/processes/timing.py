"""A running episode, the time that it has used, and the line where it waits.

Each step of an episode is timed. The time limit counts the episode's own work and waits, but neither its samples and
tools, which have limits of their own, nor the steps of other episodes in the process.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlworker.environments.episode import Episode
from rlworker.environments.policy import Host, Policy
from rlworker.environments.record import IDLE, Job, Sample, Segment, Verdict

if TYPE_CHECKING:  # most environments have no endpoint
    from rlworker.environments.endpoint.conversation import Conversation

_OURS = str(Path(__file__).parent.parent)

ReportFn = Callable[[int], None]
"""A function that is called with the number of the episode that takes a step; ``IDLE`` for none."""


class RunningEpisode(Policy):
    """A running episode. Its environment gets it as the policy.

    Args:
        host: carries out the calls of the policy.
        job: the episode to run.
        sample: the job's sample, decoded.

    Attributes:
        first_sample: the sample that was drawn before the episode began, until it is used.
        known_segments: number of sequences that the driver knows, and number of segments of the last of them.
        asked: number of samples and verdicts that it has asked for.
        futures: number of an ask or question -> the sample or verdict that it waits for.
        waits: number of samples, tools and verdicts that it waits for.
        used_s: seconds that count towards its time limit.
        left_at: time at which its last step ended, on the clock of ``StepTimer``.
        is_sampling, gave_up: whether it waits for a sample, and whether it cancelled its wait.
        conversation: the calls of its endpoint; None where it has none.
    """

    def __init__(self, host: Host, job: Job, sample: Sample | None):
        super().__init__(host, job.number, job.seed)
        self.row, self.group, self.group_size = job.row, job.group, job.group_size
        self.first_sample = sample
        self.known_segments: tuple[int, int] = 1, 1
        self.futures: dict[int, asyncio.Future] = {}
        self.waits = self.tool_calls = self.tool_failures = self.asked = 0
        self.used_s = self.left_at = 0.0
        self.has_ended = self.is_sampling = self.gave_up = False
        self.task: asyncio.Task | None = None
        self.coroutine: Any = None
        self.conversation: Conversation | None = None

    @property
    def awaits_driver(self) -> bool:
        """Tell whether it waits for a sample or a verdict, which the driver sends."""
        return bool(self.futures)

    @property
    def turn(self) -> int:
        """Number of turns that it has sampled."""
        return self.episode.turns if self.episode else 0

    def hand_on(self, call: int, answer: Sample | Verdict) -> None:
        """Hand the episode a sample or verdict that it waits for."""
        future = self.futures.pop(call)
        if not future.done():  # an environment may give up a task of its own that waits for it
            future.set_result(answer)

    def find_context(self, episode: Episode) -> tuple[bool, Segment]:
        """Return whether the last sequence is new to the driver, and its tokens that the driver does not know."""
        (sequences, known), last = self.known_segments, episode.sequences[-1]
        has_own_prompt = episode.turns == 0 and last[0].token_ids is not episode.row.prompt_ids
        is_new = len(episode.sequences) > sequences or has_own_prompt
        unknown = last if is_new else last[known:]
        parts = [np.asarray(segment.token_ids, np.int32) for segment in unknown]
        images = tuple(image for segment in unknown for image in segment.images)
        return is_new, Segment(np.concatenate(parts) if parts else (), images=images)

    def locate(self) -> list[tuple[FrameType, int]]:
        """List the frames in which the episode waits, outermost first, without frames of this package."""
        frames, coroutine = [], self.coroutine
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append((frame, frame.f_lineno))
            coroutine = coroutine.cr_await
        return [place for place in frames if not is_ours(place[0])]


class StepTimer:
    """Times the steps of a process's episodes.

    Args:
        report: is called at each step.

    Attributes:
        step: the episode that takes a step, and when the step began; None between steps. The watching thread reads it.
    """

    def __init__(self, report: ReportFn):
        self._report, self._busy_s = report, 0.0
        self.step: tuple[RunningEpisode, float] | None = None

    def take_step(self, running: RunningEpisode, act: Callable, *args: Any) -> Any:
        """Call ``act(*args)`` as a step of an episode, and add the time to ``used_s``."""
        began = time.monotonic()
        if running.has_ended:
            running.used_s = 0.0  # a task that others share: it goes on, and the limit is one of each step
        elif not running.waits:
            running.used_s += began - self._busy_s - running.left_at
        self._report(running.number)
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
        """Begin to count the time of an episode."""
        running.left_at = time.monotonic() - self._busy_s

    def turn_idle(self) -> None:
        """Report that the event loop runs while no episode takes a step."""
        self._report(IDLE)

    def is_overdue(self, running: RunningEpisode, limit_s: float) -> bool:
        """Tell whether an episode has used more than ``limit_s`` while it waits for neither a sample nor a tool.

        The clock stands still while any episode takes a step.
        """
        return not running.waits and running.used_s + time.monotonic() - self._busy_s - running.left_at > limit_s


class TimedCoroutine(Coroutine):
    """A coroutine of an environment whose steps are timed by a ``StepTimer``."""

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
    """List the frames from an episode's step to ``frame``, outermost first, without frames of this package."""
    frames = []
    for place in traceback.walk_stack(frame):
        if place[0].f_code is StepTimer.take_step.__code__:
            break
        frames.append(place)
    return [place for place in reversed(frames) if not is_ours(place[0])]


def is_ours(frame: FrameType) -> bool:
    """Tell whether a frame belongs to this package."""
    return frame.f_code.co_filename.startswith(_OURS)
