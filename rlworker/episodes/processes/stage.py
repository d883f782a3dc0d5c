"""The plays of one process. They run side by side on one event loop, until each waits for a sample or has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np

from rlworker.data.rows import Row
from rlworker.episodes.codec import Codec, Stops, using_codec
from rlworker.episodes.episode import Episode
from rlworker.episodes.model import EpisodeLimit, Model, Play, PlayLimits, Sample, ToolFailure, read_calls
from rlworker.episodes.processes.running import ReportFn, RunningPlay, StepTimer, TimedCoroutine, is_ours, locate_play
from rlworker.episodes.record import Answer, Ending, FailureKind, Job, Message, Piece, Reply, digest_ids
from rlworker.episodes.tools.runner import ToolRunner, read_outcome
from rlworker.rewards.user_code import Interrupt, describe_error, locate, name_function

_TICK_S = 0.1

_playing: ContextVar[RunningPlay | None] = ContextVar("playing", default=None)


class Stage:
    """Runs the plays of one process.

    Args:
        report: hears how far it is.

    Attributes:
        timer: times every step. is_closed: whether it has ended.
    """

    def __init__(self, play: Play, codec: Codec, limits: PlayLimits, report: ReportFn = lambda *_: None):
        self.play, self.codec, self.limits, self.timer = play, codec, limits, StepTimer(report)
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._tools = ToolRunner()
        self._live: dict[int, RunningPlay] = {}
        self._rows: dict[int, Row] = {}
        self._active = 0  # live plays that do not wait for a sample
        self._settled: asyncio.Future | None = None
        self._reply, self._contexts = Reply(), []

    def advance(self, message: Message) -> Reply:
        """Begin jobs, give answers, and let all plays run until each waits for a sample or has ended.

        An answer to a play that has ended meanwhile is dropped.
        """
        if message.rows:
            self._rows = message.rows
        with using_codec(self.codec):
            for job in message.jobs:
                self._begin(job)
            answers = message.list_answers()
            texts = self.codec.decode_all([answer.token_ids for _, answer in answers])
            for (number, answer), text in zip(answers, texts, strict=True):
                if number in self._live:
                    self._answer(self._live[number], answer, text)
            self._loop.run_until_complete(self._settle(message.longest_s))
        reply, contexts = self._reply, self._contexts
        reply.runs_on = self._active > 0
        self._reply, self._contexts = Reply(), []
        if contexts:
            reply.requests.token_ids = np.concatenate([np.asarray(ids, np.int32) for ids in contexts])
        return reply

    def close(self) -> None:
        """End all plays and their tools."""
        self.is_closed = True
        for running in self._live.values():
            assert running.task
            running.task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._tools.close()
        self._loop.close()

    # -- a play

    def _begin(self, job: Job) -> None:
        running = RunningPlay(job, self._rows[job.row], self)
        self._live[job.number] = running
        self._active += 1
        self.timer.begin(running)
        context = copy_context()
        context.run(_playing.set, running)
        running.coroutine = self._perform(running)
        running.task = self._loop.create_task(running.coroutine, context=context)

    async def _perform(self, running: RunningPlay) -> None:
        try:
            result, failure = await self.play(running.model, running.row), None
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever the user's code raises is this episode's outcome
            result, failure = None, self._explain(running, error)
        if not running.has_ended:
            self._end(running, failure or self._check_result(running, result), result)

    def _note_end(self, running: RunningPlay, task: asyncio.Task) -> None:
        """Take note of a task that was interrupted between two lines of ours."""
        error = None if task.cancelled() else task.exception()
        self._end(running, self._explain(running, error or asyncio.CancelledError("cancelled")))

    def _explain(self, running: RunningPlay, error: BaseException) -> tuple[FailureKind, str]:
        if isinstance(error, Interrupt):
            return "blocked", self._tell_block(str(error))
        kind = "limit" if isinstance(error, EpisodeLimit) else "raised"
        return kind, describe_error(error, is_ours)

    def _tell_block(self, where: str) -> str:
        return f"held its process for {self.limits.time_limit_s:g} s, {where}"

    def _check_result(self, running: RunningPlay, result: Any) -> tuple[FailureKind, str] | None:
        if not isinstance(result, Episode):
            return "no_episode", f"returned {result!r:.80}, expected its Episode, {locate_play(self.play)}"
        sampled = running.model.episode
        if sampled and sampled is not result:
            return "no_episode", f"returned another Episode than it sampled for, {locate_play(self.play)}"
        return None if result.turns else ("unsampled", f"returned before it sampled, {locate_play(self.play)}")

    def _end(self, running: RunningPlay, failure: tuple[FailureKind, str] | None, result: Any = None) -> None:
        """Take the play off the stage with what came of it."""
        running.has_ended = True
        del self._live[running.number]
        if not running.future:
            self._note_settled()
        episode = running.model.episode or (result if isinstance(result, Episode) else None)
        if failure:
            failure = failure[0], f"turn {running.turn}: {failure[1]}"
        rewards, forks = (tuple(episode.rewards), episode.forks) if episode else ((), 0)
        counts = running.tool_calls, running.tool_failures
        self._reply.endings.append(Ending(running.number, rewards, failure, forks, *counts))

    # -- what a play asks for

    async def sample(self, model: Model, episode: Episode, max_tokens: int, stop: Stops) -> Sample:
        """Answer ``Model.sample``."""
        running = self._live.get(model.number)
        if running is None or running.model is not model:
            raise RuntimeError("sample: this play has ended")
        if running.gave_up:
            raise RuntimeError("sample: the play gave up one that it had asked for; let a sample come to its end")
        if running.future:
            raise RuntimeError("sample: the play waits for a sample already; await one after the other")
        stops = self.codec.encode_stops(stop)
        is_new, pieces = running.find_context(episode)
        if running.answers:
            digest, answer = running.answers.popleft()
            text = self.codec.decode(answer.token_ids)
            if digest != digest_ids([token for piece in pieces for token in piece.token_ids]):
                raise RuntimeError(
                    "sample: the play was begun anew and wrote something else than before; draw random numbers from "
                    "model.random, and call what may answer differently by model.tool"
                )
        else:
            self._ask(running, episode, max_tokens, stops, is_new, pieces)
            answer, text = await self._wait(running)
        episode.add_sample(answer.token_ids)
        running.note_context(episode)
        calls, call_error = read_calls(answer.calls)
        return Sample(text, answer.token_ids, answer.finished, calls, call_error)

    def _ask(self, running, episode: Episode, max_tokens: int, stops, is_new: bool, pieces: list[Piece]) -> None:
        requests, number = self._reply.requests, running.number
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

    async def _wait(self, running: RunningPlay) -> tuple[Answer, str]:
        future = running.future = self._loop.create_future()
        running.waits += 1
        self._note_settled()
        try:
            return await future
        except asyncio.CancelledError:
            running.gave_up = True
            raise
        finally:
            running.waits -= 1

    def _answer(self, running: RunningPlay, answer: Answer, text: str) -> None:
        assert running.future
        future, running.future = running.future, None
        self._active += 1
        if not future.done():  # a play may give up a task of its own that waits for it
            future.set_result((answer, text))

    async def call_tool(
        self, model: Model, call: Callable, args: tuple, keywords: Mapping[str, Any], limit_s: float, memory_mb: int
    ) -> Any:
        """Answer ``Model.tool``."""
        running = self._live[model.number]
        number, running.tool_calls = running.tool_calls, running.tool_calls + 1
        outcome = running.tools.get(number)
        if outcome is None:
            running.waits += 1
            try:
                outcome = await self._tools.call(call, args, keywords, limit_s, memory_mb)
            finally:
                running.waits -= 1
            self._reply.tools.append((running.number, number, outcome))
        try:
            return read_outcome(outcome, name_function(call))
        except ToolFailure:
            running.tool_failures += 1
            raise

    # -- time

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task:
        """Make a task whose steps are timed, where it is a play's or one that a play began."""
        context = options.get("context")
        running = context.get(_playing) if context else _playing.get()
        if running:
            coroutine = TimedCoroutine(coroutine, running, self.timer)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def _settle(self, longest_s: float | None) -> None:
        self._settled = self._loop.create_future()
        self._tick()
        try:
            if self._active:
                await asyncio.wait([self._settled], timeout=longest_s)
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
        self.timer.turn_idle()
        for running in list(self._live.values()):
            if running.task and running.task.done():
                self._note_end(running, running.task)
        limit = self.limits.time_limit_s
        for running in [each for each in self._live.values() if self.timer.is_overdue(each, limit)]:
            where = locate(running.locate())
            self._end(running, ("timeout", f"no end after {limit:g} s of its own, awaiting {where}"))
            assert running.task
            running.task.cancel()
        self._ticking = self._loop.call_later(min(_TICK_S, limit / 10), self._tick)
