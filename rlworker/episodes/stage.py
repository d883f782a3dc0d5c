"""The plays of one process. They run side by side on one event loop, until all of them wait for a sample.

Each step of a play is timed, so that its limit counts what it did and waited for itself: neither its samples and tools,
which have limits of their own, nor the steps of its neighbours.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rlworker.data.rows import Row
from rlworker.episodes.codec import Codec, using_codec
from rlworker.episodes.episode import Episode
from rlworker.episodes.model import EpisodeLimit, Model, Play, PlayLimits, Sample, ToolFailure, read_calls
from rlworker.episodes.record import IDLE, Answer, Ending, FailureKind, Job, Message, Piece, Reply, digest_ids
from rlworker.episodes.tools.runner import ToolRunner, name_tool, read_outcome
from rlworker.rewards.user_code import Interrupt, describe_error, locate

_TICK_S = 0.1
_OURS = str(Path(__file__).parent)

_playing: ContextVar[Performance | None] = ContextVar("playing", default=None)


class Performance:
    """A play that runs.

    Attributes:
        answers: those to be given again, before the first that is asked for. tools: outcomes of tools, likewise.
        told: sequences, and pieces of the last of them, that the driver knows. future: of the sample that it waits for.
        waits: samples and tools that it waits for. used_s: seconds that count. left_at: when its last step ended, on
            the stage's clock. gave_up: it asked for a sample and did not wait for it.
    """

    def __init__(self, job: Job, row: Row, host: Stage):
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


class _Steps(Coroutine):
    """A coroutine of a play, each step of which is timed."""

    def __init__(self, coroutine: Coroutine, performance: Performance, stage: Stage):
        self._coroutine, self._performance, self._stage = coroutine, performance, stage

    def send(self, value: Any) -> Any:
        return self._take(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._take(self._coroutine.throw, *error)

    def _take(self, act: Callable, *args: Any) -> Any:
        try:
            return self._stage.take_step(self._performance, act, *args)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop for all plays
            raise RuntimeError(f"{type(error).__name__} in a task of the play") from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


class Stage:
    """Runs the plays of one process in lock step.

    Args:
        report: is told the number and turn of the play that takes a step, and ``IDLE`` when the loop turns without.

    Attributes:
        step: the play that takes a step and when that began; None between steps. The thread that watches reads it.
        is_closed: whether it has ended.
    """

    def __init__(
        self, play: Play, codec: Codec, limits: PlayLimits, report: Callable[[int, int], None] = lambda *_: None
    ):
        self.play, self.codec, self.limits, self.report = play, codec, limits, report
        self.step: tuple[Performance, float] | None = None
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._tools = ToolRunner()
        self._live: dict[int, Performance] = {}
        self._rows: dict[int, Row] = {}
        self._busy_s = 0.0  # in steps of all plays
        self._active = 0  # live plays that do not wait for a sample
        self._settled: asyncio.Future | None = None
        self._reply, self._contexts = Reply(), []

    def advance(self, message: Message) -> Reply:
        """Begin jobs, give answers, and let all plays run until each waits for a sample or has ended."""
        if message.rows:
            self._rows = message.rows
        with using_codec(self.codec):
            for job in message.jobs:
                self._begin(job)
            answers = message.list_answers()
            texts = self.codec.decode_all([answer.token_ids for _, answer in answers])
            for (number, answer), text in zip(answers, texts, strict=True):
                self._answer(self._live[number], answer, text)
            self._loop.run_until_complete(self._settle())
        reply, contexts = self._reply, self._contexts
        self._reply, self._contexts = Reply(), []
        if contexts:
            reply.requests.token_ids = np.concatenate([np.asarray(ids, np.int32) for ids in contexts])
        return reply

    def close(self) -> None:
        """End all plays and their tools."""
        self.is_closed = True
        for performance in self._live.values():
            assert performance.task
            performance.task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._tools.close()
        self._loop.close()

    # -- a play

    def _begin(self, job: Job) -> None:
        performance = Performance(job, self._rows[job.row], self)
        self._live[job.number] = performance
        self._active += 1
        performance.left_at = self._read_clock()
        context = copy_context()
        context.run(_playing.set, performance)
        performance.coroutine = self._perform(performance)
        performance.task = self._loop.create_task(performance.coroutine, context=context)
        performance.task.add_done_callback(partial(self._note_end, performance))

    async def _perform(self, performance: Performance) -> None:
        try:
            result, failure = await self.play(performance.model, performance.row), None
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever the user's code raises is this episode's outcome
            result, failure = None, self._explain(performance, error)
        if not performance.has_ended:
            self._end(performance, failure or self._check_result(performance, result), result)

    def _note_end(self, performance: Performance, task: asyncio.Task) -> None:
        """Take note of a task that was interrupted between two lines of ours."""
        if not performance.has_ended:
            error = None if task.cancelled() else task.exception()
            self._end(performance, self._explain(performance, error or asyncio.CancelledError("cancelled")))

    def _explain(self, performance: Performance, error: BaseException) -> tuple[FailureKind, str]:
        if isinstance(error, Interrupt):
            return "blocked", self._tell_block(str(error))
        kind = "limit" if isinstance(error, EpisodeLimit) else "raised"
        return kind, describe_error(error, _is_ours)

    def _tell_block(self, where: str) -> str:
        return f"held its process for {self.limits.time_limit_s:g} s, {where}"

    def _check_result(self, performance: Performance, result: Any) -> tuple[FailureKind, str] | None:
        if not isinstance(result, Episode):
            return "no_episode", f"returned {result!r:.80}, expected its Episode, at {_locate_play(self.play)}"
        sampled = performance.model.episode
        if sampled and sampled is not result:
            return "no_episode", f"returned another Episode than it sampled for, at {_locate_play(self.play)}"
        return None if result.turns else ("unsampled", f"returned before it sampled, at {_locate_play(self.play)}")

    def _end(self, performance: Performance, failure: tuple[FailureKind, str] | None, result: Any = None) -> None:
        """Take the play off the stage with what came of it."""
        performance.has_ended = True
        del self._live[performance.number]
        if not performance.future:
            self._note_settled()
        episode = performance.model.episode or (result if isinstance(result, Episode) else None)
        if failure:
            failure = failure[0], f"turn {performance.turn}: {failure[1]}"
        rewards, forks = (tuple(episode.rewards), episode.forks) if episode else ((), 0)
        counts = performance.tool_calls, performance.tool_failures
        self._reply.endings.append(Ending(performance.number, rewards, failure, forks, *counts))

    # -- what a play asks for

    async def sample(self, model: Model, episode: Episode, max_tokens: int, stop: Sequence[int | str]) -> Sample:
        """Answer ``Model.sample``."""
        performance = self._live.get(model.number)
        if performance is None or performance.model is not model:
            raise RuntimeError("sample: this play has ended")
        if performance.gave_up:
            raise RuntimeError("sample: the play gave up one that it had asked for; let a sample come to its end")
        if performance.future:
            raise RuntimeError("sample: the play waits for a sample already; await one after the other")
        stops = self.codec.encode_stops(stop)
        is_new, pieces = _take_context(performance, episode)
        if performance.answers:
            digest, answer = performance.answers.popleft()
            text = self.codec.decode(answer.token_ids)
            if digest != digest_ids([token for piece in pieces for token in piece.token_ids]):
                raise RuntimeError(
                    "sample: the play was begun anew and wrote something else than before; draw random numbers from "
                    "model.random, and call what may answer differently by model.tool"
                )
        else:
            self._ask(performance, episode, max_tokens, stops, is_new, pieces)
            answer, text = await self._wait(performance)
        episode.add_sample(answer.token_ids)
        performance.told = len(episode.sequences), len(episode.sequences[-1])
        calls, call_error = read_calls(answer.calls)
        return Sample(text, answer.token_ids, answer.finished, calls, call_error)

    def _ask(self, performance, episode: Episode, max_tokens: int, stops, is_new: bool, pieces: list[Piece]) -> None:
        requests, number = self._reply.requests, performance.number
        requests.numbers.append(number)
        requests.forks.append(is_new)
        requests.lengths.append(sum(len(piece.token_ids) for piece in pieces))
        requests.max_tokens.append(max_tokens)
        self._contexts += [piece.token_ids for piece in pieces]
        if images := tuple(image for piece in pieces for image in piece.images):
            requests.images[number] = images
        if stops:
            requests.stops[number] = stops
        if episode.tool_parser:
            requests.parsers[number] = episode.tool_parser, episode.tools

    async def _wait(self, performance: Performance) -> tuple[Answer, str]:
        future = performance.future = self._loop.create_future()
        performance.waits += 1
        self._note_settled()
        try:
            return await future
        except asyncio.CancelledError:
            performance.gave_up = True
            raise
        finally:
            performance.waits -= 1

    def _answer(self, performance: Performance, answer: Answer, text: str) -> None:
        assert performance.future
        future, performance.future = performance.future, None
        self._active += 1
        if not future.done():  # a play may give up a task of its own that waits for it
            future.set_result((answer, text))

    async def call_tool(self, model: Model, call: Callable, args: tuple, limit_s: float, memory_mb: int) -> Any:
        """Answer ``Model.tool``."""
        performance = self._live[model.number]
        number, performance.tool_calls = performance.tool_calls, performance.tool_calls + 1
        outcome = performance.tools.get(number)
        if outcome is None:
            performance.waits += 1
            try:
                outcome = await self._tools.call(call, args, limit_s, memory_mb)
            finally:
                performance.waits -= 1
            self._reply.tools.append((performance.number, number, outcome))
        try:
            return read_outcome(outcome, name_tool(call))
        except ToolFailure:
            performance.tool_failures += 1
            raise

    # -- time

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task:
        """Make a task whose steps are timed, where it is a play's or one that a play began."""
        context = options.get("context")
        performance = context.get(_playing) if context else _playing.get()
        if performance:
            coroutine = _Steps(coroutine, performance, self)
        return asyncio.Task(coroutine, loop=loop, **options)

    def take_step(self, performance: Performance, act: Callable, *args: Any) -> Any:
        """Let a play take a step, and count its time."""
        began = time.monotonic()
        if not performance.waits:
            performance.used_s += began - self._busy_s - performance.left_at
        self.report(performance.number, performance.turn)
        self.step = performance, began
        try:
            return act(*args)
        finally:
            self.step = None
            end = time.monotonic()
            self._busy_s += end - began
            performance.used_s += end - began
            performance.left_at = end - self._busy_s

    def _read_clock(self) -> float:
        """Seconds of a clock that stands still while a play takes a step."""
        return time.monotonic() - self._busy_s

    async def _settle(self) -> None:
        self._settled = self._loop.create_future()
        self._tick()
        try:
            if self._active:
                await self._settled
        finally:
            self._ticking.cancel()
            self._settled = None

    def _note_settled(self) -> None:
        """Take note that a play waits for a sample or has ended."""
        self._active -= 1
        if not self._active and self._settled and not self._settled.done():
            self._settled.set_result(None)

    def _tick(self) -> None:
        """Look for plays that await for too long what is neither a sample nor a tool."""
        self.report(IDLE, 0)
        limit, clock = self.limits.time_limit_s, self._read_clock()
        for performance in list(self._live.values()):
            if not performance.waits and performance.used_s + clock - performance.left_at > limit:
                where = locate(_list_frames(performance.coroutine))
                self._end(performance, ("timeout", f"no end after {limit:g} s of its own, awaiting {where}"))
                assert performance.task
                performance.task.cancel()
        self._ticking = self._loop.call_later(min(_TICK_S, limit / 10), self._tick)


def _take_context(performance: Performance, episode: Episode) -> tuple[bool, list[Piece]]:
    """Find what the episode's sequence has that the driver does not know; whether it is a whole new one."""
    sequences, pieces = performance.told
    last = episode.sequences[-1]
    if len(episode.sequences) > sequences:
        return True, last
    if pieces == 1 and episode.turns == 0 and last[0].token_ids is not episode.row.prompt_ids:
        return True, last
    return False, last[pieces:]


def _locate_play(play: Any) -> str:
    code = getattr(inspect.unwrap(play), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(play)


def _list_frames(coroutine: Any) -> list[tuple[FrameType, int]]:
    """List the frames of a coroutine that waits, outermost first, ours left out."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return [place for place in frames if not _is_ours(place[0])]


def list_user_frames(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """List the frames from that of a play's step to ``frame``, outermost first, ours left out."""
    frames, ours = [], Stage.take_step.__code__
    for place in traceback.walk_stack(frame):
        if place[0].f_code is ours:
            break
        frames.append(place)
    return [place for place in reversed(frames) if not _is_ours(place[0])]


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)
