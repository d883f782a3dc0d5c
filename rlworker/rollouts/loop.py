"""The loop of rollouts: processes run environments, engines sample for them, and finished episodes become groups.

With a ``TurnQueue`` the loop runs in the thread that waits, and every turn ends at a barrier: runs repeat bit for bit.
With a ``RequestQueue`` it runs beside the trainer, in a thread of its own, and no episode waits for another.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

import ray

from engines.batch.samples import Completion, Request, Sampling
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.watch import wait_until
from rlworker.data.rows import Row
from rlworker.environments.codec import Codec
from rlworker.environments.processes.pool import POLL_S, ProcessPool
from rlworker.environments.record import LostWorker, Reply
from rlworker.environments.reward import Environment
from rlworker.rollouts.episode_state import EpisodeState, EpisodeStates, NoteFn, make_states
from rlworker.rollouts.questions import Questions
from rlworker.rollouts.trajectory import RolloutBatch, TrajectoryGroup

if TYPE_CHECKING:
    from engines.vllm.tools import ToolCalls
    from rlworker.rollouts.requests import RequestQueue
    from rlworker.rollouts.turn_queue import TurnQueue

_TICK_S = 0.02
"""Seconds between two looks at calls from the trainer's thread."""


class RolloutLoop:
    """Runs rollout batches: ``begin`` starts the episodes of some rows, and ``wait`` returns their trajectories.

    Use it as a context manager, so that it ends before the processes and engines that it uses.

    Args:
        environment: the function that runs an episode. pool: the processes that run it.
        rollouts: the vLLM engines. queue: hands sample requests to them, ahead of the trainer or turn by turn.
        codec: decodes samples whose tool calls are parsed.
        default: reward of an episode that failed.
        questions: hands questions to the served models.

    Attributes:
        environment_seconds: seconds of ``wait`` in which environments ran and nothing was sampled or asked; only of use
            with a ``TurnQueue``.
    """

    def __init__(
        self,
        environment: Environment,
        pool: ProcessPool,
        rollouts: Rollouts,
        queue: RequestQueue | TurnQueue,
        codec: Codec,
        default: float = 0.0,
        questions: Questions | None = None,
    ):
        self._pool, self._rollouts, self._queue, self._codec, self._default = pool, rollouts, queue, codec, default
        self.questions = questions or Questions()
        self._samples_first = getattr(environment, "samples_first", False)
        self._scores_groups = getattr(environment, "scores_groups", False)
        self._note_lost: NoteFn | None = None
        self._batch_numbers, self._next_number = count(), 0
        self.environment_seconds = 0.0
        self._clear()
        self._changed, self._calls = threading.Condition(), SimpleQueue()
        self._fault: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True) if queue.runs_ahead else None
        if self._thread:
            self._thread.start()

    def repeat_lost(self, note: NoteFn, stall_timeout_s: float) -> None:
        """Make the episodes of a process that dies or hangs begin anew in another process, from now on.

        Without this call, the episode that a lost process ran fails at once. With it, an episode fails only where the
        next process is lost at it too.

        Args:
            note: is told ``{process: how it ended}``, and raises where the run may not go on.
            stall_timeout_s: seconds after which a process that does not begin counts as hung.
        """
        self._note_lost = note
        self._pool.limit_stalls(stall_timeout_s)
        self._call(self._clear).result()

    def begin(self, rows: Sequence[Row], sampling: Sampling, goes_first: bool = False) -> RolloutBatch:
        """Begin ``sampling.count`` episodes of each row, and return the batch that collects them, without waiting.

        Args:
            goes_first: whether its requests are sampled before all other requests that have not begun.
        """
        batch = RolloutBatch(next(self._batch_numbers), rows, sampling, goes_first)
        self._call(lambda: self._open(batch))
        return batch

    def wait(self, batch: RolloutBatch) -> list[TrajectoryGroup]:
        """Wait for a batch, and return its groups ``[P]``, one for each row. Lost engines are replaced meanwhile.

        Raises:
            Exception: any error that ended the loop.
        """
        start = time.perf_counter() - self._queue.sampling_seconds - self.questions.seconds
        wait_until(lambda slice_s: self._wait(batch, slice_s))
        spent = time.perf_counter() - self._queue.sampling_seconds - self.questions.seconds
        self.environment_seconds += spent - start
        return batch.groups

    def sample_each(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]:
        """Sample one completion of each row's prompt, without an environment. Each engine gets equally many rows.

        These requests go before all others that have not begun.
        """
        if not self._thread:
            requests = [Request(row.prompt_ids, sampling, row.images) for row in rows]
            return self._rollouts.sample(requests, sampling.stream, equal_shares=True)
        batch = RolloutBatch(next(self._batch_numbers), rows, sampling, True, has_episodes=False)
        self._call(lambda: self._open(batch))
        wait_until(lambda slice_s: self._wait(batch, slice_s))
        return [completion for group in batch.groups for completion in group]

    def forget(self, stream: tuple[int, ...]) -> None:
        """Forget all batches, and draw from the random numbers of ``stream`` from now on. Going back needs this."""

        def forget() -> None:
            if len(self._states) or self._pool.references:
                self._pool.restart()
            self._clear()
            self._queue.reset(stream)

        self._call(forget).result()

    def __enter__(self) -> RolloutLoop:
        return self

    def __exit__(self, *_) -> None:
        self._closed = True
        if self._thread:
            self._thread.join()

    # -- the thread that waits, and the loop's own where it runs ahead

    def _call(self, function: Callable[[], None]) -> Future:
        """Call a function between two turns of the loop."""
        future: Future = Future()
        if not self._thread:
            future.set_result(function())
            return future
        with self._changed:
            self._check_alive()
            self._calls.put((function, future))
        return future

    def _check_alive(self) -> None:
        if self._fault:
            raise self._fault

    def _wait(self, batch: RolloutBatch, slice_s: float) -> bool:
        if not self._thread:
            self._take_turn()
            self.questions.replace_lost()
            return batch.is_done
        with self._changed:
            self._changed.wait_for(lambda: batch.is_done or self._fault or self._has_lost, slice_s)
        self._check_alive()
        if lost := self._queue.list_lost():
            self._rollouts.replace_or_raise(lost)
        self.questions.replace_lost()
        return batch.is_done

    @property
    def _has_lost(self) -> bool:
        return bool(self._queue.list_lost() or self.questions.list_lost())

    def _run(self) -> None:
        try:
            while not self._closed:
                while not self._calls.empty():
                    function, future = self._calls.get()
                    try:
                        function()
                    except BaseException as error:
                        future.set_exception(error)
                        raise
                    future.set_result(None)
                self._take_turn()
        except BaseException as error:  # the thread that waits is told
            self._fault = error
        finally:
            with self._changed:
                self._fault = self._fault or RuntimeError("rollout: the loop was closed")
                while not self._calls.empty():
                    self._calls.get()[1].set_exception(self._fault)
                self._changed.notify_all()

    # -- the loop

    def _take_turn(self) -> None:
        """Take what processes and engines have, send them what is due, and wait a moment for more."""
        for slot, reply in self._pool.poll().items():
            self._take_reply(slot, reply)
        for slot in sorted(self._free):
            self._send(slot)
        is_idle = len(self._free) == len(self._pool)
        for number, call, verdict in self.questions.collect(is_idle):
            is_idle = False  # until the episodes that were waiting for it have gone on
            if self._states.add_verdict(number, call, verdict):
                self._answered[self._states[number].slot].append(number)
        for (batch_number, number), completions in self._queue.collect(is_idle and not self.questions.is_open):
            self._take_samples(self._batches[batch_number], number, completions)
        self._parse_samples()
        for slot in sorted(self._free):
            self._send(slot)
        if any(batch.is_done for batch in self._batches.values()) or self._has_lost:
            self._batches = {number: batch for number, batch in self._batches.items() if not batch.is_done}
            self.questions.keep(self._batches)
            with self._changed:
                self._changed.notify_all()
        if waited := [*self._queue.references, *self.questions.references, *self._pool.references]:
            ray.wait(waited, timeout=_TICK_S if self._thread else POLL_S)
        elif self._thread and self._calls.empty():
            threading.Event().wait(_TICK_S)

    def _open(self, batch: RolloutBatch) -> None:
        self._batches[batch.number] = batch
        sampling = batch.sampling
        requests = [Request(row.prompt_ids, sampling, row.images, batch.goes_first) for row in batch.rows]
        if not batch.has_episodes:
            queue = cast("RequestQueue", self._queue)
            return queue.submit_to_each([((batch.number, i), request) for i, request in enumerate(requests)])
        self._queue.open(sampling, self._samples_first)
        self.questions.open(sampling.stream)
        batch.first = self._next_number
        states = make_states(batch, None if self._samples_first else len(self._pool))
        self._next_number += len(states)
        self._states.add(states)
        if self._samples_first:
            groups = range(batch.first, self._next_number, sampling.count)
            return self._queue.submit(((batch.number, group), one) for group, one in zip(groups, requests, strict=True))
        for state in states:
            self._new[state.slot].append(state)

    def _clear(self) -> None:
        slots = range(len(self._pool))
        self.questions.reset()
        self._batches: dict[int, RolloutBatch] = {}
        self._states = EpisodeStates(self._default, self._note_lost, self._scores_groups)
        self._free, self._run_on = set(slots), set[int]()
        self._sampled_rows = deque[list[EpisodeState]]()  # groups whose first samples are there, for any process
        self._new: list[list[EpisodeState]] = [[] for _ in slots]
        self._answered: list[list[int]] = [[] for _ in slots]
        self._sampled: list[tuple[EpisodeState, Completion]] = []

    # -- processes

    def _take_reply(self, slot: int, reply: Reply | LostWorker) -> None:
        self._free.add(slot)
        self._run_on.discard(slot)
        if isinstance(reply, LostWorker):
            ended = self._states.handle_lost_worker(reply)
            self._new[slot] = self._states.list_living(slot)
            return self._end(ended)
        self._queue.submit(self._states.take(reply))
        for batch, question in self._states.take_questions(reply):
            self.questions.submit(batch, question)
        # Where it was begun anew, a sample or a verdict may have come before it asked again.
        self._answered[slot] += [asked.number for asked in (*reply.asks, *reply.questions)]
        if reply.runs_on:
            self._run_on.add(slot)
        self._end(list(reply.results))

    def _send(self, slot: int) -> None:
        """Send a process jobs to begin, or samples that it waits for; else let it go on, where it has not settled."""
        if self._sampled_rows and not self._new[slot]:
            # Ever smaller parts, so that no process waits long for a slow one.
            parts = 1 if len(self._pool) == 1 else 2 * len(self._pool)
            for _ in range(-(-len(self._sampled_rows) // parts)):
                self._new[slot] += self._sampled_rows.popleft()
        new, self._new[slot] = [state for state in self._new[slot] if state.trajectory is None], []
        for state in new:
            state.slot = slot
        jobs, samples, verdicts = self._states.begin(new), {}, {}
        if not jobs:
            answered, self._answered[slot] = dict.fromkeys(self._answered[slot]), []
            samples, verdicts = self._states.address([one for one in answered if one in self._states])
        if jobs or samples or verdicts or slot in self._run_on:
            self._free.discard(slot)
            self._pool.begin(slot, jobs, samples, self._queue.longest_s, verdicts)

    def _end(self, numbers: Sequence[int]) -> None:
        """Note that episodes have ended, and collect the groups that are whole."""
        ended = [self._states[number] for number in numbers]
        if aborted := [(state.batch.number, state.number) for state in ended if state.is_asked]:
            self._queue.abort(aborted)
        for group, batch in {state.group: state.batch for state in ended}.items():
            members = range(group, group + batch.sampling.count)
            if all(self._states[member].trajectory for member in members):
                place = (group - batch.first) // batch.sampling.count
                batch.add(place, [self._states.collect(member) for member in members])

    # -- samples

    def _take_samples(self, batch: RolloutBatch, number: int, completions: list[Completion]) -> None:
        if not batch.has_episodes:
            return batch.add(number, completions)
        if number not in self._states or (state := self._states[number]).trajectory:
            return  # it has ended meanwhile
        if state.slot >= 0:
            return self._sampled.append((state, completions[0]))
        states = [self._states[number + place] for place in range(len(completions))]
        for state, completion in zip(states, completions, strict=True):
            state.add_sample(completion, None)
        self._sampled_rows.append(states)

    def _parse_samples(self) -> None:
        """Hand samples on, those with a parser once it has found their tool calls."""
        sampled, self._sampled = self._sampled, []
        by_parser: dict[tuple[str, str], list[tuple[EpisodeState, Completion]]] = {}
        for state, completion in sampled:
            parser, tools = state.parser or ("", ())
            by_parser.setdefault((parser, json.dumps(tools)), []).append((state, completion))
        for (parser, tools), found in by_parser.items():
            self._parse(found, parser, json.loads(tools))

    def _parse(self, found: list[tuple[EpisodeState, Completion]], parser: str, tools: list) -> None:
        if not parser:
            return self._answer(found, [None] * len(found))
        self._queue.parse_tools(
            *(self._codec.decode_samples([completion.token_ids for _, completion in found]), parser, tools),
            then=lambda calls: self._answer(found, calls),
            otherwise=lambda: self._sampled.extend(found),
        )

    def _answer(self, found: Sequence[tuple[EpisodeState, Completion]], calls: Sequence[ToolCalls | None]) -> None:
        for (state, completion), found_calls in zip(found, calls, strict=True):
            if state.number in self._states and state.trajectory is None:
                state.add_sample(completion, found_calls)
                self._answered[state.slot].append(state.number)
