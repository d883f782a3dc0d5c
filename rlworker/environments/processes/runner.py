"""Run the episodes of one process side by side on one event loop, until each waits for the driver or has ended."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlworker.environments.codec import Codec, Stops, using_codec
from rlworker.environments.episode import Episode, RewardError, read_parts
from rlworker.environments.policy import Endpoint, EpisodeLimit, EpisodeLimits, NoVerdict, Policy, ToolFailure
from rlworker.environments.processes.timing import ReportFn, RunningEpisode, StepTimer, TimedCoroutine, is_ours
from rlworker.environments.record import Answers, Ask, FailureKind, Job, Question, Reply, Sample, Verdict
from rlworker.environments.reward import Environment, GroupCall, spread_numbers
from rlworker.environments.user_code import Interrupt, describe_error, locate, name_function

if TYPE_CHECKING:
    from rlworker.data.rows import Row
    from rlworker.environments.endpoint.server import Endpoints
    from rlworker.environments.tools.runner import ToolRunner

_TICK_S = 0.1

_running: ContextVar[RunningEpisode | None] = ContextVar("running", default=None)


class EnvRunner:
    """Runs the environments of one process's episodes.

    Args:
        environment: the function that runs an episode. codec: encodes and decodes its text.
        limits: limits of each episode.
        report: is called with the number of the episode at each step.

    Attributes:
        timer: times every step. is_closed: whether ``close`` was called.
    """

    def __init__(
        self, environment: Environment, codec: Codec, limits: EpisodeLimits, report: ReportFn = lambda *_: None
    ):
        self.environment, self.codec, self.limits, self.timer = environment, codec, limits, StepTimer(report)
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._tools: ToolRunner | None = None
        self._endpoints: Endpoints | None = None
        self._live: dict[int, RunningEpisode] = {}
        self._backlog: deque[RunningEpisode] = deque()  # which have not begun
        self._groups: dict[int, list[tuple[RunningEpisode, GroupCall]]] = {}
        self._is_immediate = getattr(environment, "is_immediate", False)
        self._active = 0  # live episodes that wait for neither a sample nor a verdict
        self._settled: asyncio.Future | None = None
        self._reply = Reply()

    def advance(self, jobs: Sequence[Job], answers: Mapping[int, Answers], longest_s: float | None) -> Reply:
        """Run all episodes until each waits for a sample or a verdict or has ended, or ``longest_s`` have passed.

        Args:
            jobs: episodes to begin.
            answers: number of a waiting episode -> all that it waits for. For an episode that has ended it is dropped.
            longest_s: seconds after which it replies although some episodes still run; None sets no limit.
        """
        end = None if longest_s is None else time.monotonic() + longest_s
        first_samples = self._decode([job.sample for job in jobs])
        self._backlog += map(partial(RunningEpisode, self), jobs, first_samples)
        calls = [(number, call) for number, of_episode in answers.items() for call in of_episode]
        values = self._decode([answer for of_episode in answers.values() for answer in of_episode.values()])
        with using_codec(self.codec):
            self._active += sum(number in self._live for number in answers)
            for (number, call), value in zip(calls, values, strict=True):
                if running := self._live.get(number):
                    running.hand_on(call, value)
            if self._is_immediate:
                self._run_immediately(end)
            else:
                self._loop.run_until_complete(self._settle(end))
        reply, self._reply = self._reply, Reply()
        reply.runs_on = self._active > 0 or bool(self._backlog)
        return reply

    def close(self) -> None:
        """End all episodes and their tools."""
        self.is_closed = True
        for running in self._live.values():
            if running.task:
                running.task.cancel()
            if running.conversation:
                running.conversation.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        if self._endpoints:
            self._endpoints.close()
        if self._tools:
            self._tools.close()
        self._loop.close()

    def _decode(self, answers: Sequence[Sample | Verdict | None]) -> list[Any]:
        """Return answers of which the samples have their texts."""
        samples = [answer for answer in answers if isinstance(answer, Sample)]
        texts = iter(self.codec.read_samples([sample.token_ids for sample in samples]))
        return [replace(answer, text=next(texts)) if isinstance(answer, Sample) else answer for answer in answers]

    # -- an episode

    def _begin(self, running: RunningEpisode) -> None:
        self._live[running.number] = running
        self._active += 1
        self.timer.begin(running)
        running.coroutine = self._perform(running)

    def _run_immediately(self, end: float | None) -> None:
        """Run episodes that await nothing but the numbers of their groups, outside of the event loop and until a time.

        A scorer may so run an event loop of its own.
        """
        while self._backlog and (end is None or time.monotonic() < end):
            running = self._backlog.popleft()
            self._begin(running)
            if call := self._take_step(running, running.coroutine.send, None):
                group = self._groups.setdefault(running.group, [])
                group.append((running, call))
                if len(group) == running.group_size:
                    self._score_group(self._groups.pop(running.group))
        self.timer.turn_idle()

    def _take_step(self, running: RunningEpisode, act: Callable, value: Any) -> GroupCall | None:
        """Let an episode take a step outside of the event loop, to its end or to where it waits for its group."""
        try:
            return self.timer.take_step(running, act, value)
        except StopIteration:
            return None
        except Interrupt as error:  # between two lines of ours
            if not running.has_ended:
                self._end(running, self._explain(running, error))
            return None

    def _score_group(self, group: Sequence[tuple[RunningEpisode, GroupCall]]) -> None:
        """Call a batch scorer for all samples of a prompt; an error is the outcome of each."""
        running, call = group[-1]
        values, error = [], None
        try:
            texts = [call.text for _, call in group]
            returned = self.timer.take_step(running, call.scorer, texts, [running.row] * len(group))
            values = spread_numbers(returned, len(group))
        except BaseException as raised:  # sys.exit() too is only this call's outcome
            error = raised
        for place, (running, _) in enumerate(group):
            if error:
                self._take_step(running, running.coroutine.throw, error)
            else:
                self._take_step(running, running.coroutine.send, values[place])

    async def _perform(self, running: RunningEpisode) -> None:
        try:
            result, failure = await self.environment(running, running.row), None
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever the user's code raises is this episode's outcome
            result, failure = None, self._explain(running, error)
        if not running.has_ended:
            self._end(running, failure or self._check_result(running, result), result)

    def _explain(self, running: RunningEpisode, error: BaseException) -> tuple[FailureKind, str]:
        if isinstance(error, Interrupt):
            return "blocked", f"held its process for {self.limits.time_limit_s:g} s, {error}"
        if isinstance(error, Exception) and running.conversation and (limit := running.conversation.limit):
            return "limit", f"{limit}; the agent was told so and ended by {describe_error(error, is_ours)}"
        kinds: dict[type, FailureKind] = {EpisodeLimit: "limit", NoVerdict: "no_verdict"}
        kind = error.kind if isinstance(error, RewardError) else kinds.get(type(error), "raised")
        return kind, describe_error(error, is_ours)

    def _check_result(self, running: RunningEpisode, result: Any) -> tuple[FailureKind, str] | None:
        if not isinstance(result, Episode):
            kind, returned = "no_episode", f"{result!r:.80}, expected its Episode"
        elif running.episode and running.episode is not result:
            kind, returned = "no_episode", "another Episode than it sampled for"
        elif not result.turns:
            kind, returned = "no_generation", "before it sampled"
        else:
            return None
        code = getattr(inspect.unwrap(self.environment), "__code__", None)
        where = f"at {code.co_filename}:{code.co_firstlineno}" if code else f"in {self.environment!r}"
        return kind, f"returned {returned}, {where}"

    def _end(self, running: RunningEpisode, failure: tuple[FailureKind, str] | None, result: Any = None) -> None:
        """Note the result of an episode, which ends."""
        running.has_ended = True
        del self._live[running.number]
        if running.conversation:
            running.conversation.close()
        if not running.awaits_driver:
            self._note_settled()
        episode = running.episode or (result if isinstance(result, Episode) else None)
        outcome: dict[str, Any] = {"tool_calls": running.tool_calls, "tool_failures": running.tool_failures}
        if episode:
            fields, fault = _read_fields(episode)
            outcome |= fields
            failure = failure or fault
        if failure:
            failure = failure[0], f"turn {running.turn}: {failure[1]}"
        self._reply.results[running.number] = outcome | {"failure": failure}

    # -- requests of an episode

    def _find_live(self, policy: Policy, call: str) -> RunningEpisode:
        if not (running := self._live.get(policy.number)) or running is not policy:
            raise RuntimeError(f"{call}: this episode has ended; await all calls of policy.{call} before you return")
        return running

    async def sample(self, policy: Policy, episode: Episode, max_tokens: int, stop: Stops) -> Sample:
        """Carry out ``Policy.sample``."""
        running = self._find_live(policy, "sample")
        if running.gave_up:
            raise RuntimeError(
                "sample: the environment cancelled an earlier call of policy.sample; await each call to its end"
            )
        if running.is_sampling:
            raise RuntimeError(
                "sample: an earlier call of policy.sample in this episode still waits; await one call after the other"
            )
        stops = self.codec.encode_stops(stop)
        is_fork, context = running.find_context(episode)
        if running.first_sample:
            sample, running.first_sample = running.first_sample, None
        else:
            parser = (episode.tool_parser, episode.tools) if episode.tool_parser else None
            ask = Ask(
                running.number,
                running.asked,
                is_fork=is_fork,
                context=context,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                parser=parser,
                logprobs=episode.logprobs,
            )
            running.is_sampling = True
            try:
                sample = await self._ask(running, ask)
            except asyncio.CancelledError:
                running.gave_up = True
                raise
            finally:
                running.is_sampling = False
        sample = sample.number_calls(episode.turns)
        episode.add_sample(sample.token_ids, sample.calls, sample.content)
        running.known_segments = len(episode.sequences), len(episode.sequences[-1])
        return sample

    async def _ask(self, running: RunningEpisode, ask: Ask | Question) -> Any:
        """Ask the driver for a sample or verdict, and wait for it."""
        self._reply.asks.append(ask)
        if not running.awaits_driver:
            self._note_settled()
        running.asked += 1
        running.futures[ask.call] = future = self._loop.create_future()
        running.waits += 1
        try:
            return await future
        finally:
            running.waits -= 1

    async def ask_model(self, policy: Policy, model: str, content: Any) -> Verdict:
        """Carry out ``Policy.judge`` and ``Policy.score``."""
        running = self._find_live(policy, "judge")
        return await self._ask(running, Question(running.number, running.asked, model, content))

    async def call_tool(
        self, policy: Policy, call: Callable, args: tuple, keywords: Mapping[str, Any], limit_s: float, memory_mb: int
    ) -> Any:
        """Carry out ``Policy.tool``."""
        from rlworker.environments.tools.runner import ToolRunner, read_outcome  # most environments have no tools

        running = self._find_live(policy, "tool")
        running.tool_calls += 1
        running.waits += 1
        self._tools = self._tools or ToolRunner()
        try:
            outcome = await self._tools.call(call, args, keywords, limit_s, memory_mb)
        finally:
            running.waits -= 1
        try:
            return read_outcome(outcome, name_function(call))
        except ToolFailure:
            running.tool_failures += 1
            raise

    def open_endpoint(self, policy: Policy, row: Row, tool_parser: str, host: str) -> Endpoint:
        """Carry out ``Policy.endpoint``."""
        from rlworker.environments.endpoint.server import Endpoints  # most environments have none

        running = self._find_live(policy, "endpoint")
        if running.conversation:
            raise ValueError("endpoint: this episode has one; call policy.endpoint once and hand its base_url on")
        self._endpoints = self._endpoints or Endpoints(self._loop, self.limits)
        endpoint, running.conversation = self._endpoints.open(policy, row, tool_parser, host)
        return endpoint

    # -- time

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task:
        """Make a task whose steps are timed, where it is an environment's or one that an environment began."""
        context = options.get("context")
        running = context.get(_running) if context else _running.get()
        if running:
            coroutine = TimedCoroutine(coroutine, running, self.timer)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def _settle(self, end: float | None) -> None:
        self._settled = self._loop.create_future()
        self._tick()
        try:
            while self._backlog:
                running, context = self._backlog.popleft(), copy_context()
                self._begin(running)
                context.run(_running.set, running)
                running.task = self._loop.create_task(running.coroutine, context=context)
            if self._active:
                await asyncio.wait([self._settled], timeout=None if end is None else max(0.0, end - time.monotonic()))
        finally:
            self._ticking.cancel()
            self._settled = None

    def _note_settled(self) -> None:
        """Note that an episode begins to wait for the driver or has ended."""
        self._active -= 1
        if not self._active and self._settled and not self._settled.done():
            self._settled.set_result(None)

    def _tick(self) -> None:
        """End episodes that await for too long something that is neither a sample, a tool nor a verdict."""
        self.timer.turn_idle()
        for running in list(self._live.values()):
            if running.task and running.task.done():  # it was interrupted between two lines of ours
                error = None if running.task.cancelled() else running.task.exception()
                self._end(running, self._explain(running, error or asyncio.CancelledError("cancelled")))
        limit = self.limits.time_limit_s
        for running in [each for each in self._live.values() if self.timer.is_overdue(each, limit)]:
            where = locate(running.locate())
            self._end(running, ("timeout", f"no end after {limit:g} s of its own, awaiting {where}"))
            assert running.task
            running.task.cancel()
        self._ticking = self._loop.call_later(min(_TICK_S, limit / 10), self._tick)


def _read_fields(episode: Episode) -> tuple[dict[str, Any], tuple[FailureKind, str] | None]:
    """Read what an environment left in its episode as plain values, the fields of a ``Trajectory``.

    Returns:
        the fields up to the first that cannot be read, and the failure that names it; None where all can be.
    """
    fields: dict[str, Any] = {"forks": episode.forks, "notes": tuple(episode.notes)}
    try:
        fields["rewards"] = tuple((int(turn), float(value)) for turn, value in episode.rewards)
        fields["answer"] = "" if episode.answer is None else str(episode.answer)
        fields["parts"] = read_parts(episode.parts)
    except Exception as error:  # whatever the user's own objects raise is this episode's outcome
        kind = error.kind if isinstance(error, RewardError) else "raised"
        return fields, (kind, f"its episode cannot be read: {describe_error(error, is_ours)}")
    return fields, None
