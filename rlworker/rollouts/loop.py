"""The loop of rollouts: processes run environments, engines sample for them, and finished episodes become groups.

With a ``TurnQueue`` the loop runs in the thread that waits, and every turn ends at a barrier: runs repeat bit for bit.
With a ``RequestQueue`` it runs beside the trainer, in a thread of its own, and no episode waits for another.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
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
from rlworker.environments.record import LostWorker, Question, Reply, Sample, Verdict
from rlworker.environments.reward import Environment
from rlworker.rollouts.episode_state import EpisodeState, Losses, NoteFn
from rlworker.rollouts.questions import Questions
from rlworker.rollouts.trajectory import Key, RolloutBatch, TrajectoryGroup

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
        self._environment = environment
        self._samples_first = getattr(environment, "samples_first", False)
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

    def note_lost(self, note: NoteFn, stall_timeout_s: float) -> None:
        """Count processes that die or hang as outages of the run, from now on.

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
        self._parse_samples()  # which were drawn before
        for slot in sorted(self._free):
            self._send(slot)
        is_idle = len(self._free) == len(self._pool)
        for state, question, verdict in self.questions.collect(is_idle):
            is_idle = False  # until the episodes that were waiting for it have gone on
            state.verdicts[question.call] = question.model, verdict
            self._answer(state, question.call, verdict)
        for key, completions in self._queue.collect(is_idle and not self.questions.is_open):
            self._take_samples(key, completions)
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
            return queue.submit_to_each([((batch.number, i, 0, 0), request) for i, request in enumerate(requests)])
        self._queue.open(sampling, self._samples_first)
        self.questions.open(sampling.stream)
        batch.first = self._next_number
        total = len(batch.rows) * sampling.count
        states = [EpisodeState(batch.first + place, batch) for place in range(total)]
        self._next_number += total
        self._states |= {state.number: state for state in states}
        if self._samples_first:
            keys = [state.key for state in states[:: sampling.count]]
            return self._queue.submit(zip(keys, requests, strict=True))
        for place, state in enumerate(states):
            self._new[place * len(self._pool) // total].append(state)

    def _clear(self) -> None:
        slots = range(len(self._pool))
        self.questions.reset()
        self._batches: dict[int, RolloutBatch] = {}
        self._states: dict[int, EpisodeState] = {}
        self._losses = Losses(self._environment, self._note_lost)
        self._free, self._run_on = set(slots), set[int]()
        self._sampled_rows = deque[list[EpisodeState]]()  # groups whose first samples are there, for any process
        self._new: list[list[EpisodeState]] = [[] for _ in slots]
        self._answered: list[list[EpisodeState]] = [[] for _ in slots]
        self._sampled: list[tuple[EpisodeState, Completion]] = []

    # -- processes

    def _take_reply(self, slot: int, reply: Reply | LostWorker) -> None:
        self._free.add(slot)
        self._run_on.discard(slot)
        if isinstance(reply, LostWorker):
            return self._take_loss(slot, reply)
        ended = [self._states[number] for number in reply.results]
        for state in ended:
            state.end(self._default, **reply.results[state.number])
        requests = []
        for ask in reply.asks:
            state = self._states[ask.number]
            if state.trajectory:
                continue  # a task of the episode had asked, and it ended without waiting
            state.open += 1
            if isinstance(ask, Question):
                self.questions.submit(state, ask)
                continue
            request = state.add_ask(ask)
            if drawn := state.batch.drawn.get(state.key):  # in a run before
                self._sampled.append((state, drawn))
            else:
                requests.append((state.key, request))
        self._queue.submit(requests)
        if requests or ended:
            self._losses.note_progress(slot)
        if reply.runs_on:
            self._run_on.add(slot)
        self._end(ended)

    def _take_loss(self, slot: int, lost: LostWorker) -> None:
        """Run the unfinished episodes of a lost process again, apart from those that fail with it."""
        unfinished = [state for state in self._states.values() if state.slot == slot and self._is_running(state)]
        failures = self._losses.explain_failures(slot, lost, unfinished)
        for state in unfinished:
            if state.number in failures:
                state.end(self._default, failure=failures[state.number])
        self._end([state for state in unfinished if state.trajectory])

        lost_runs = [state for state in unfinished if not state.trajectory]
        self._queue.abort([state.key for state in lost_runs if state.ask])
        again = [EpisodeState(state.number, state.batch, state.losses) for state in lost_runs]
        self._states |= {state.number: state for state in again}
        self._new[slot] = again + self._new[slot]

    def _send(self, slot: int) -> None:
        """Send a process episodes to begin, and answers that it waits for; else let it go on, if it has not settled."""
        if self._sampled_rows and not self._new[slot]:
            # Ever smaller parts, so that no process waits long for a slow one.
            parts = 1 if len(self._pool) == 1 else 2 * len(self._pool)
            for _ in range(-(-len(self._sampled_rows) // parts)):
                self._new[slot] += self._sampled_rows.popleft()
        new, self._new[slot] = self._new[slot], []
        sizes = Counter(state.group for state in new)
        jobs = [state.begin(slot, sizes[state.group]) for state in new]
        answered, self._answered[slot] = self._answered[slot], []
        answers = {}
        for state in filter(self._is_running, answered):
            answers[state.number], state.answers = state.answers, {}
        if jobs or answers or slot in self._run_on:
            self._free.discard(slot)
            self._pool.begin(slot, jobs, answers, self._queue.longest_s)

    def _answer(self, state: EpisodeState, call: int, answer: Sample | Verdict) -> None:
        """Take an answer to a run of an episode. Its process is sent all of them at once, when the last has come."""
        if not self._is_running(state):
            return
        state.answers[call] = answer
        state.open -= 1
        if not state.open:
            self._answered[state.slot].append(state)

    def _is_running(self, state: EpisodeState) -> bool:
        """Tell whether a run of an episode goes on: neither has it ended, nor another run taken its place."""
        return self._states.get(state.number) is state and state.trajectory is None

    def _end(self, ended: Sequence[EpisodeState]) -> None:
        """Note that episodes have ended, and collect the groups that are whole."""
        if aborted := [state.key for state in ended if state.ask]:
            self._queue.abort(aborted)
        for group, batch in {state.group: state.batch for state in ended}.items():
            members = [self._states[number] for number in range(group, group + batch.sampling.count)]
            if not all(member.trajectory for member in members):
                continue
            for member in members:
                self._losses.report(member)
                del self._states[member.number]
            batch.add((group - batch.first) // batch.sampling.count, [member.trajectory for member in members])

    # -- samples

    def _take_samples(self, key: Key, completions: list[Completion]) -> None:
        batch, number = self._batches[key[0]], key[1]
        if not batch.has_episodes:
            return batch.add(number, completions)
        state = self._states.get(number)
        if not state or state.key != key:
            return  # it has ended meanwhile, or runs again
        if state.slot >= 0:
            batch.drawn[key] = completions[0]
            return self._sampled.append((state, completions[0]))
        states = [self._states[number + place] for place in range(len(completions))]
        batch.drawn |= {state.key: completion for state, completion in zip(states, completions, strict=True)}
        self._sampled_rows.append(states)

    def _parse_samples(self) -> None:
        """Hand samples on, those with a parser once it has found their tool calls."""
        sampled, self._sampled = self._sampled, []
        by_parser: dict[str, list[tuple[EpisodeState, Completion]]] = {}
        for state, completion in sampled:
            if self._is_running(state) and state.ask:
                by_parser.setdefault(json.dumps(state.ask.parser), []).append((state, completion))
        for parser, of_parser in by_parser.items():
            name, tools = json.loads(parser) or ("", [])
            if not name:
                self._take_parsed(of_parser, [None] * len(of_parser))
                continue
            texts = self._codec.decode_samples([completion.token_ids for _, completion in of_parser])
            self._queue.parse_tools(
                texts,
                name,
                tools,
                then=partial(self._take_parsed, of_parser),
                otherwise=partial(self._take_back, of_parser),
            )

    def _take_back(self, sampled: Sequence[tuple[EpisodeState, Completion]]) -> None:
        """Take back samples whose engine was lost before it parsed them."""
        self._sampled += sampled

    def _take_parsed(
        self, sampled: Sequence[tuple[EpisodeState, Completion]], calls: Sequence[ToolCalls | None]
    ) -> None:
        for (state, completion), found_calls in zip(sampled, calls, strict=True):
            if self._is_running(state) and state.ask:
                call = state.ask.call
                self._answer(state, call, state.add_sample(completion, found_calls))
