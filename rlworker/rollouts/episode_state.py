"""The state of every running episode, as the driver keeps it while processes run their environments.

From it an episode whose process is lost begins anew: with the samples and tool results that it had.
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
    Reply,
    Sample,
    Segment,
    Trajectory,
    digest_ids,
)
from rlworker.errors import MONITOR, RunError
from rlworker.rollouts.trajectory import Key, RolloutBatch
from rlworker.tracking.terminal import LOGGER

if TYPE_CHECKING:
    from engines.vllm.tools import ToolCalls

_BLAMES = 2
"""Processes that are lost at one episode when it is to blame, where lost ones are replaced."""
_LOSSES = 3
"""Processes that may be lost one after another while no episode ran."""
_DIED = "its process died (it exited, crashed or had no memory left)"
_HELD = "it held its process, which had to be ended"
_UNSEEN = "in code that does not let Python look"

NoteFn = Callable[[Mapping[str, str]], None]
"""Hears which processes were lost, and what became of each."""


@dataclass(eq=False, slots=True)
class EpisodeState:
    """The state of a running episode.

    Attributes:
        number: among all that run. batch: that it belongs to. group: number of its prompt's first episode.
        seed: of its random numbers.
        slot: the process that runs it; -1 until one is chosen.
        sequences: segments so far. samples: its own, each after the context that came before it. told: samples of
            these that its process knows. tools: outcomes of its tool calls.
        context: ids before the sample that is asked for. parser: of tool calls in it, by name, and the tools' schemas;
            None where there is none to parse. is_asked: it is being drawn. waits: the process waits for it.
        losses: processes that were lost at it. trajectory: of the episode, once it has ended.
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
    context: Sequence[int] | np.ndarray = ()
    parser: tuple[str, tuple] | None = None
    is_asked: bool = False
    waits: bool = False
    losses: int = 0
    trajectory: Trajectory | None = None

    def __post_init__(self):
        self.sequences = [[Segment(self.row.prompt_ids, CONTEXT, self.row.images)]]

    def add_context(self, context: Segment, is_fork: bool) -> None:
        """Record what stands before the sample that is asked for now."""
        self.context = context.token_ids
        if is_fork and not self.samples:
            self.sequences.clear()  # a prompt of its own takes the place of the row's
        if is_fork:
            self.sequences.append([])
        if len(context.token_ids):
            self.sequences[-1].append(context)

    def add_sample(self, completion: Completion, calls: ToolCalls | None) -> None:
        """Record a sample."""
        self.sequences[-1].append(Segment(completion.token_ids, len(self.samples), (), completion))
        self.samples.append((self.context, Sample.read(completion, calls)))
        self.is_asked = False

    def end(self, **result: Any) -> None:
        """Record the end: makes the trajectory of a result's fields, without what stands before a sample that was never
        drawn."""
        if self.is_asked and self.samples and self.sequences[-1][-1].turn == CONTEXT:
            self.sequences[-1].pop()
            if not self.sequences[-1]:
                self.sequences.pop()
        self.trajectory = Trajectory(self.row, tuple(map(tuple, self.sequences)), **result)

    def make_request(self, max_tokens: int, stop_token_ids: Sequence[int] = ()) -> Request:
        """Make the request for a sample that goes on from all that the last sequence has.

        Args:
            stop_token_ids: end it, beside those of the batch.
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
        note_lost: hears of lost processes that no episode is to blame for. It raises where the run may not go on.
            Without it an episode at which a process is lost is to blame at once.
        blames_groups: all episodes of a prompt are to blame together, since one call scores them.
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
        """Take up episodes, which no process knows of yet."""
        self._states |= {state.number: state for state in states}

    def list_living(self, slot: int) -> list[EpisodeState]:
        """List the episodes of a process that have not ended."""
        return [one for one in self._states.values() if one.slot == slot and one.trajectory is None]

    def begin(self, states: Sequence[EpisodeState]) -> list[Job]:
        """Make the jobs by which a process begins episodes, or begins them anew with all samples that they have."""
        sizes, jobs = Counter(state.group for state in states), []
        for state in states:
            state.told, state.waits = len(state.samples), False
            samples = [(digest_ids(context), sample) for context, sample in state.samples]
            group = state.group, sizes[state.group]
            jobs.append(Job(state.number, state.row, state.seed, samples, dict(state.tools), *group))
        return jobs

    def take(self, reply: Reply) -> Iterator[tuple[Key, Request]]:
        """Record a process's reply; yields requests for the samples that its episodes ask for and that are not drawn
        yet."""
        self._losses = 0
        for number, call, outcome in reply.tools:
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
            state.is_asked, state.parser = True, ask.parser
            yield (state.batch.number, ask.number), state.make_request(ask.max_tokens, ask.stop_token_ids)

    def address(self, numbers: Iterable[int]) -> dict[int, Sample]:
        """Address the samples of episodes of one process that wait for one, by the episodes' numbers."""
        found = [self._states[number] for number in numbers]
        states = [one for one in found if one.waits and one.told < len(one.samples) and one.trajectory is None]
        for state in states:
            state.told, state.waits = len(state.samples), False
        return {state.number: state.samples[-1][1] for state in states}

    def handle_lost_worker(self, lost: LostWorker) -> list[int]:
        """Decide whether an episode is to blame for the end of its process: the numbers of those that end by it.

        An episode is to blame only where the next process is lost at it too, or where its line held the process.

        Raises:
            RunError: processes are lost time and again while no episode runs.
        """
        self._losses += 1
        state = self._states.get(lost.number)
        if state is None or state.trajectory:  # it was at none, or at one that had ended
            if self._losses >= _LOSSES:
                text = f"{lost.name} {lost.fate}, {_LOSSES} times in a row, while no episode ran"
                raise RunError(f"environment: {text}; its log says more")
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
        """Collect the trajectory of an episode that has ended, which is forgotten here."""
        state = self._states.pop(number)
        if lost := self._suspected.pop(number, None):
            self._report_lost(lost)  # it came to its end in another process
        trajectory = state.trajectory
        assert trajectory, "an episode that has not ended asks for a sample"
        if trajectory.failure and trajectory.failure[0] != "no_generation":
            return replace(trajectory, rewards=((len(state.samples) - 1, self._default),))
        return trajectory


def make_states(batch: RolloutBatch, slots: int | None) -> list[EpisodeState]:
    """Make the states of a batch's episodes, which have random numbers by their place in it.

    Args:
        slots: processes that share them in even parts; None leaves that open.
    """
    count, seed, first = batch.sampling.count, batch.sampling.stream, batch.first
    states, total = [], len(batch.rows) * count
    for place in range(total):
        row, slot = place // count, place * slots // total if slots else -1
        states.append(EpisodeState(first + place, batch, first + row * count, batch.rows[row], (*seed, place), slot))
    return states
