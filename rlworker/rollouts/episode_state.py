"""The driver keeps the state of every running episode here, while other processes run the environments.

When such a process is lost, its episodes begin anew with the samples and tool results that the state holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.batch.samples import Completion, Request
from rlworker.data.rows import Row
from rlworker.environments.record import (
    CONTEXT,
    HELD,
    Job,
    LostWorker,
    Question,
    Reply,
    Sample,
    Segment,
    Trajectory,
    Verdict,
    digest_ids,
)
from rlworker.errors import MONITOR, RunError
from rlworker.rollouts.trajectory import Key, RolloutBatch
from rlworker.tracking.terminal import LOGGER

if TYPE_CHECKING:
    from engines.vllm.tools import ToolCalls

_BLAMES = 2
"""Number of processes lost at one episode from which on that episode is to blame, where lost processes are replaced."""
_LOSSES = 3
"""Number of processes lost one after another, while no episode ran, that ends the run."""
_DIED = "its process died (it exited, crashed or had no memory left)"
_HELD = "it held its process, which had to be ended"
_UNSEEN = "in code that does not let Python look"

NoteFn = Callable[[Mapping[str, str]], None]
"""A function that is told which processes were lost: ``{name of the process: how it ended}``."""


@dataclass(eq=False, slots=True)
class EpisodeState:
    """The state of one running episode. ``make_states`` makes it, and ``EpisodeStates`` changes it.

    Attributes:
        number: number of the episode, unique in a ``RolloutLoop``.
        batch: the rollout batch that the episode belongs to.
        group: number of the first episode of the same prompt.
        seed: seed of the episode's random numbers.
        slot: index of the process that runs the environment; -1 until one is chosen.
        sequences: the segments of each sequence so far.
        samples: for each turn, the ids of the context that was added before it, and the sample.
        told: how many of ``samples`` have been sent to the process.
        tools: number of a tool call -> its pickled outcome.
        questions: number of a question to a served model -> name of the model.
        verdicts: number of a question -> its verdict. untold: numbers of those that the process has not been sent.
        context: ids that were added before the sample that is requested now.
        parser: name of the tool-call parser and schemas of the tools; None where samples are not parsed.
        logprobs: whether samples are sent to the process with their logprobs.
        is_asked: whether a sample is requested from an engine and has not come.
        waits: whether the environment's process waits for a sample or a verdict to be sent to it.
        losses: how many processes were lost while they ran this episode.
        trajectory: the finished trajectory; None until the episode has ended.
    """

    number: int
    batch: RolloutBatch
    group: int
    row: Row
    seed: tuple[int, ...]
    slot: int = -1
    sequences: list[list[Segment]] = field(init=False)
    samples: list[tuple[Sequence[int] | np.ndarray, Sample]] = field(default_factory=list)
    told: int = 0
    tools: dict[int, bytes] = field(default_factory=dict)
    questions: dict[int, str] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    untold: set[int] = field(default_factory=set)
    context: Sequence[int] | np.ndarray = ()
    parser: tuple[str, tuple] | None = None
    logprobs: bool = False
    is_asked: bool = False
    waits: bool = False
    losses: int = 0
    trajectory: Trajectory | None = None

    def __post_init__(self):
        self.sequences = [[Segment(self.row.prompt_ids, CONTEXT, self.row.images)]]

    def add_context(self, context: Segment, is_fork: bool) -> None:
        """Record the segment that stands before the next sample. With ``is_fork`` it begins a new sequence."""
        self.context = context.token_ids
        if is_fork and not self.samples:
            self.sequences.clear()  # a prompt of its own takes the place of the row's
        if is_fork:
            self.sequences.append([])
        if len(context.token_ids):
            self.sequences[-1].append(context)

    def add_sample(self, completion: Completion, calls: ToolCalls | None) -> None:
        """Record the sample of a turn, and the tool calls that a parser found in it; None without a parser."""
        self.sequences[-1].append(Segment(completion.token_ids, len(self.samples), (), completion))
        self.samples.append((self.context, Sample.read(completion, calls, self.logprobs)))
        self.is_asked = False

    def end(self, **result: Any) -> None:
        """Record the end of the episode: make its trajectory from ``result``, which are fields of ``Trajectory``.

        The context before a sample that was requested and never came is left out.
        """
        if self.is_asked and self.samples and self.sequences[-1][-1].turn == CONTEXT:
            self.sequences[-1].pop()
            if not self.sequences[-1]:
                self.sequences.pop()
        verdicts = tuple((self.questions[call], verdict) for call, verdict in sorted(self.verdicts.items()))
        self.trajectory = Trajectory(self.row, tuple(map(tuple, self.sequences)), verdicts=verdicts, **result)

    def make_request(self, max_tokens: int, stop_token_ids: Sequence[int] = ()) -> Request:
        """Make the request for the next sample, which continues the last sequence.

        Args:
            max_tokens: most tokens of the sample.
            stop_token_ids: ids that end the sample, in addition to those of the batch.
        """
        sampling, segments = self.batch.sampling, self.sequences[-1]
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_token_ids)))
        sampling = replace(sampling, count=1, max_tokens=max_tokens, stop_token_ids=stops)
        images = tuple(image for segment in segments for image in segment.images)
        ids = self.row.prompt_ids  # one object for all episodes of a row, as it is sent
        if len(segments) > 1 or segments[0].token_ids is not ids:
            ids = tuple(np.concatenate([np.asarray(segment.token_ids, np.int32) for segment in segments]).tolist())
        return Request(ids, sampling, images, self.batch.goes_first)


class EpisodeStates:
    """The states of all running episodes.

    Args:
        default: reward of an episode that failed.
        note_lost: is told of each lost process that no episode is to blame for, and raises where the run may not go on.
            Without it an episode is to blame as soon as one process is lost at it.
        blames_groups: whether all episodes of a prompt fail together, since one call scores them.
    """

    def __init__(self, default: float = 0.0, note_lost: NoteFn | None = None, blames_groups: bool = False):
        self._default, self._note_lost, self._blames_groups = default, note_lost, blames_groups
        self._states: dict[int, EpisodeState] = {}
        self._suspected: dict[int, LostWorker] = {}
        self._losses = 0

    def __getitem__(self, number: int) -> EpisodeState:
        return self._states[number]

    def __contains__(self, number: int) -> bool:
        return number in self._states

    def __len__(self) -> int:
        return len(self._states)

    def add(self, states: Iterable[EpisodeState]) -> None:
        """Add the states of episodes that no process has begun yet."""
        self._states |= {state.number: state for state in states}

    def list_living(self, slot: int) -> list[EpisodeState]:
        """List the episodes of the process with index ``slot`` that have not ended."""
        return [one for one in self._states.values() if one.slot == slot and one.trajectory is None]

    def begin(self, states: Sequence[EpisodeState]) -> list[Job]:
        """Make the jobs by which a process begins these episodes; samples that an episode has are sent along."""
        sizes, jobs = Counter(state.group for state in states), []
        for state in states:
            state.told, state.waits = len(state.samples), False
            state.untold.clear()
            samples = [(digest_ids(context), sample) for context, sample in state.samples]
            known = dict(state.tools), state.group, sizes[state.group], dict(state.verdicts)
            jobs.append(Job(state.number, state.row, state.seed, samples, *known))
        return jobs

    def take(self, reply: Reply) -> Iterator[tuple[Key, Request]]:
        """Record the reply of a process, and yield ``(key, request)`` for each sample to request from an engine."""
        self._losses = 0
        for number, call, outcome in reply.tools:
            if number in self._states:  # a tool that its environment did not await may outlive the episode
                self._states[number].tools[call] = outcome
        for number, result in reply.results.items():
            self._states[number].end(**result)
        for ask in reply.asks:
            state = self._states[ask.number]
            if state.trajectory:
                continue  # it has ended without waiting for a sample that a task of it had asked for
            state.waits = True
            if state.is_asked or state.told < len(state.samples):
                continue  # it was begun anew: that sample is being drawn, or was meanwhile
            state.add_context(ask.context, ask.is_fork)
            state.is_asked, state.parser, state.logprobs = True, ask.parser, ask.logprobs
            yield (state.batch.number, ask.number), state.make_request(ask.max_tokens, ask.stop_token_ids)

    def take_questions(self, reply: Reply) -> Iterator[tuple[RolloutBatch, Question]]:
        """Record the questions in the reply of a process, and yield those that are new, each with its batch."""
        for question in reply.questions:
            state = self._states[question.number]
            if state.trajectory:
                continue
            state.waits = True
            if question.call not in state.questions:  # else it was begun anew, and the question is open or answered
                state.questions[question.call] = question.model
                yield state.batch, question

    def add_verdict(self, number: int, call: int, verdict: Verdict) -> bool:
        """Record the verdict on a question, and tell whether its episode still waits for it."""
        if number not in self._states or self._states[number].trajectory:
            return False
        state = self._states[number]
        state.verdicts[call] = verdict
        state.untold.add(call)
        return True

    def address(self, numbers: Iterable[int]) -> tuple[dict[int, Sample], dict[int, dict[int, Verdict]]]:
        """Return ``{episode: sample}`` and ``{episode: {question: verdict}}`` for a process.

        They are of those in ``numbers`` that wait, once all that they wait for is there.
        """
        samples, verdicts = {}, {}
        for state in [self._states[number] for number in numbers]:
            is_open = state.is_asked or len(state.verdicts) < len(state.questions)
            if not state.waits or is_open or state.trajectory:
                continue
            if state.told < len(state.samples):
                samples[state.number] = state.samples[-1][1]
            if state.untold:
                verdicts[state.number] = {call: state.verdicts[call] for call in sorted(state.untold)}
            if state.number in samples or state.number in verdicts:
                state.told, state.waits = len(state.samples), False
                state.untold.clear()
        return samples, verdicts

    def handle_lost_worker(self, lost: LostWorker) -> list[int]:
        """Record that a process was lost, and decide whether the episode that it ran is to blame and fails.

        The episode is to blame where a second process is lost at it, or where its code held the process.

        Returns:
            the numbers of the episodes that have ended as failed; the process's other episodes begin anew.

        Raises:
            RunError: processes are lost one after another while no episode runs.
        """
        self._losses += 1
        state = self._states.get(lost.number)
        if state is None or state.trajectory:  # it was at none, or at one that had ended
            if self._losses >= _LOSSES:
                text = f"{lost.name} {lost.fate}, {_LOSSES} times in a row, while no episode ran"
                raise RunError(f"environment: {text}; environment.log in the run folder shows the cause")
            self._report_lost(lost)
            return []
        state.losses += 1
        is_monitors = lost.fate.startswith(MONITOR)  # which chooses by other things than what a process holds
        if (self._note_lost or is_monitors) and not lost.where and state.losses < _BLAMES:
            self._suspected[lost.number] = lost
            return []
        self._suspected.pop(lost.number, None)
        died = "died", f"its process {lost.fate}" if is_monitors else _DIED
        kind, message = ("blocked", f"{_HELD}, {lost.where or _UNSEEN}") if lost.fate == HELD else died
        blamed = [state]
        if self._blames_groups:
            blamed = [one for one in self._states.values() if one.group == state.group and one.trajectory is None]
        for one in blamed:
            one.end(failure=(kind, f"turn {lost.turn}: {message}"))
        return [one.number for one in blamed]

    def _report_lost(self, lost: LostWorker) -> None:
        if self._note_lost:
            self._note_lost({lost.name: lost.fate})
        else:
            LOGGER.warning(f"environment: {lost.name} {lost.fate}; its episodes begin anew")

    def collect(self, number: int) -> Trajectory:
        """Return the trajectory of an episode that has ended, and forget its state."""
        state = self._states.pop(number)
        if lost := self._suspected.pop(number, None):
            self._report_lost(lost)  # it came to its end in another process
        trajectory = state.trajectory
        assert trajectory, "an episode that has not ended asks for a sample"
        if trajectory.failure and trajectory.failure[0] != "no_generation":
            return replace(trajectory, rewards=((len(state.samples) - 1, self._default),))
        return trajectory


def make_states(batch: RolloutBatch, slots: int | None) -> list[EpisodeState]:
    """Make the states of all episodes of a batch. An episode's random numbers follow from its place in the batch.

    Args:
        slots: number of processes, over which the episodes are split evenly; None leaves the processes open.
    """
    count, seed, first = batch.sampling.count, batch.sampling.stream, batch.first
    states, total = [], len(batch.rows) * count
    for place in range(total):
        row, slot = place // count, place * slots // total if slots else -1
        states.append(EpisodeState(first + place, batch, first + row * count, batch.rows[row], (*seed, place), slot))
    return states
