"""The state of every running episode, as the driver keeps it while processes run their environments.

From it an episode whose process is lost begins anew: with the samples and tool results that it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engines.batch.samples import Completion, Image, Prompt
from rlworker.data.rows import Row
from rlworker.environments.record import (
    CONTEXT,
    HELD,
    EpisodeResult,
    Job,
    LostWorker,
    Message,
    Reply,
    Sample,
    Segment,
    Trajectory,
    digest_ids,
)
from rlworker.errors import MONITOR, RunError
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
        number: among all that run. group: number of its prompt's first episode. seed: of its random numbers.
        prompt: of its row, one object for all episodes of that.
        slot: the process that runs it; -1 until one is chosen.
        sequences: segments so far. samples: its own, each after the context that came before it. told: samples of
            these that its process knows. tools: outcomes of its tool calls.
        context: ids before the sample that is asked for. parser: of tool calls in it, by name, and the tools' schemas;
            None where there is none to parse. is_asked: it is being drawn. waits: the process waits for it.
        losses: processes that were lost at it. result: how it ended, once it has.
    """

    number: int
    group: int
    row: Row
    prompt: Prompt
    seed: tuple[int, ...]
    slot: int = -1
    sequences: list[list[Segment]] = field(init=False)
    samples: list[tuple[np.ndarray, Sample]] = field(default_factory=list)
    told: int = 0
    tools: dict[int, bytes] = field(default_factory=dict)
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    parser: tuple[str, tuple] | None = None
    is_asked: bool = False
    waits: bool = False
    losses: int = 0
    result: EpisodeResult | None = None

    def __post_init__(self):
        self.sequences = [[Segment(self.row.prompt_ids, CONTEXT, self.row.images)]]

    def add_context(self, ids: np.ndarray, images: tuple[Image, ...], is_fork: bool) -> None:
        """Record what stands before the sample that is asked for now."""
        self.context = ids
        if is_fork and not self.samples:
            self.sequences.clear()  # a prompt of its own takes the place of the row's
        if is_fork:
            self.sequences.append([])
        if len(ids):
            self.sequences[-1].append(Segment(ids, CONTEXT, images))

    def add_sample(self, completion: Completion, calls: ToolCalls | None) -> None:
        """Record a sample."""
        self.sequences[-1].append(Segment(completion.token_ids, len(self.samples), (), completion))
        self.samples.append((self.context, Sample.read(completion, calls)))
        self.is_asked = False

    def end(self, result: EpisodeResult) -> None:
        """Record the end. What stands before a sample that was never drawn belongs to no turn."""
        self.result = result
        if self.is_asked and self.samples and self.sequences[-1][-1].turn == CONTEXT:
            self.sequences[-1].pop()
            if not self.sequences[-1]:
                self.sequences.pop()

    def make_prompt(self) -> Prompt:
        """Make the prompt of all that the last sequence has."""
        segments = self.sequences[-1]
        if len(segments) == 1 and segments[0].token_ids is self.row.prompt_ids:
            return self.prompt  # one object for all episodes of a row, as it is sent
        images = tuple(image for segment in segments for image in segment.images)
        ids = np.concatenate([np.asarray(segment.token_ids, np.int32) for segment in segments])
        return Prompt(tuple(ids.tolist()), images)


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

    def __len__(self) -> int:
        return len(self._states)

    def add(self, states: Iterable[EpisodeState]) -> None:
        """Take up episodes, which no process knows of yet."""
        self._states |= {state.number: state for state in states}

    def list_living(self, slot: int) -> list[EpisodeState]:
        """List the episodes of a process that have not ended."""
        return [one for one in self._states.values() if one.slot == slot and one.result is None]

    def begin(self, states: Sequence[EpisodeState], longest_s: float) -> Message:
        """Have a process begin episodes, or begin them anew with all samples that they have.

        Args:
            longest_s: as ``Message`` has it.
        """
        sizes, jobs = Counter(state.group for state in states), []
        for state in states:
            state.told, state.waits = len(state.samples), False
            samples = [(digest_ids(context), sample) for context, sample in state.samples]
            group = state.group, sizes[state.group]
            jobs.append(Job(state.number, state.row, state.seed, samples, dict(state.tools), *group))
        return Message(jobs, longest_s=longest_s)

    def take(self, reply: Reply) -> Iterator[tuple[EpisodeState, int, tuple[int, ...]]]:
        """Record a process's reply; yields the episodes of which a sample is to be drawn, with its most tokens and its
        stop tokens beside the run's."""
        self._losses = 0
        for number, call, outcome in reply.tools:
            self._states[number].tools[call] = outcome
        for result in reply.results:
            self._states[result.number].end(result)
        contexts = np.split(reply.token_ids, np.cumsum(reply.lengths)[:-1]) if reply.numbers else []
        columns = zip(reply.numbers, reply.forks, contexts, reply.max_tokens, strict=True)
        for number, is_fork, ids, max_tokens in columns:
            state = self._states[number]
            if state.result:
                continue  # it has ended without waiting for a sample that a task of it had asked for
            state.waits = True
            if state.is_asked or state.told < len(state.samples):
                continue  # it was begun anew: that sample is being drawn, or was meanwhile
            state.add_context(ids, reply.images.get(number, ()), is_fork)
            state.is_asked, state.parser = True, reply.parsers.get(number)
            yield state, max_tokens, reply.stops.get(number, ())

    def address(self, numbers: Iterable[int], longest_s: float) -> Message | None:
        """Address the samples of episodes of one process that wait for one; None where there is none to tell."""
        found = [self._states[number] for number in numbers]
        states = [one for one in found if one.waits and one.told < len(one.samples) and one.result is None]
        if not states:
            return None
        for state in states:
            state.told, state.waits = len(state.samples), False
        return Message(samples={state.number: state.samples[-1][1] for state in states}, longest_s=longest_s)

    def handle_lost_worker(self, lost: LostWorker) -> list[int]:
        """Decide whether an episode is to blame for the end of its process: the numbers of those that end by it.

        An episode is to blame only where the next process is lost at it too, or where its line held the process.

        Raises:
            RunError: processes are lost time and again while no episode runs.
        """
        self._losses += 1
        state = self._states.get(lost.number)
        if state is None or state.result:  # it was at none, or at one that had ended
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
            blamed = [one for one in self._states.values() if one.group == state.group and one.result is None]
        for one in blamed:
            one.end(EpisodeResult(one.number, (), (kind, f"turn {lost.turn}: {message}")))
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
        result = state.result
        assert result, "an episode that has not ended asks for a sample"
        rewards = result.rewards
        if result.failure and result.failure[0] != "no_generation":
            rewards = ((len(state.samples) - 1, self._default),)
        sequences = tuple(map(tuple, state.sequences))
        counts = result.forks, result.tool_calls, result.tool_failures
        return Trajectory(state.row, sequences, rewards, result.failure, *counts, result.answer)


def make_states(
    rows: Sequence[Row], count: int, seed: tuple[int, ...], first: int, slots: int | None
) -> list[EpisodeState]:
    """Make the states of ``count`` episodes of each row, numbered from ``first`` on.

    Args:
        seed: of their random numbers, with the place of each among these.
        slots: processes that share them in even parts; None leaves that open.
    """
    prompts = [Prompt(row.prompt_ids, row.images) for row in rows]
    states, total = [], len(rows) * count
    for place in range(total):
        row, slot = place // count, place * slots // total if slots else -1
        states.append(EpisodeState(first + place, first + row * count, rows[row], prompts[row], (*seed, place), slot))
    return states
