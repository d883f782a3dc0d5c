"""The driver's record of every running episode: what was written and sampled so far, and what it waits for.

The environment runs in another process. When that process is lost, its unfinished episodes are run again from the
beginning. ``Losses`` decides which of them have failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.batch.samples import Completion, Request
from rlworker.base.errors import MONITOR, RunError
from rlworker.base.terminal import LOGGER
from rlworker.data.rows import Row
from rlworker.environments.record import (
    CONTEXT,
    HELD,
    Answers,
    Ask,
    Job,
    LostWorker,
    Sample,
    Segment,
    Trajectory,
    Verdict,
)
from rlworker.environments.reward import Environment, is_run_once
from rlworker.rollouts.trajectory import Key, RolloutBatch

if TYPE_CHECKING:
    from engines.vllm.tools import ToolCalls

RERUNS = 2
"""Number of times that an episode is run again because its process was lost while it ran; then it has failed."""
_LOSSES = 3
"""Number of losses of a slot's processes, without progress of an episode and while none ran, that ends the run."""

NoteFn = Callable[[Mapping[str, str]], None]
"""A function that is told which processes were lost: ``{name of the process: how it ended}``."""


@dataclass(eq=False, slots=True)
class EpisodeState:
    """One run of an episode, from its beginning to its end or to the loss of its process.

    Attributes:
        number: number of the episode, unique in a ``RolloutLoop``.
        batch: the rollout batch that the episode belongs to.
        losses: the processes that were lost while they ran this episode, in all runs of it.
        row: the question.
        group: number of the first episode of the same prompt.
        seed: seed of the episode's random numbers, which follow from its place in the batch.
        slot: index of the process that was told to begin it; -1 until one was.
        sequences: the segments of each sequence so far.
        turns: number of samples so far.
        ask: what the process asked of the next sample; None while it asks for none.
        key: name of the request for that sample.
        open: number of samples and verdicts that have not come.
        answers: samples and verdicts that have come and were not sent to the process so far.
        verdicts: number of a question -> name of the model, and verdict.
        trajectory: the finished trajectory; None until the episode has ended.
    """

    number: int
    batch: RolloutBatch
    losses: list[LostWorker] = field(default_factory=list)
    row: Row = field(init=False)
    group: int = field(init=False)
    seed: tuple[int, ...] = field(init=False)
    slot: int = -1
    sequences: list[list[Segment]] = field(init=False)
    turns: int = 0
    ask: Ask | None = None
    key: Key = field(init=False)
    open: int = 0
    answers: Answers = field(default_factory=dict)
    verdicts: dict[int, tuple[str, Verdict]] = field(default_factory=dict)
    trajectory: Trajectory | None = None

    def __post_init__(self):
        place, count = self.number - self.batch.first, self.batch.sampling.count
        self.row = self.batch.rows[place // count]
        self.group = self.number - place % count
        self.seed = (*self.batch.sampling.stream, place)
        self.sequences = [[Segment(self.row.prompt_ids, CONTEXT, self.row.images)]]
        self.key = self.batch.number, self.number, 0, 0

    def begin(self, slot: int, group_size: int) -> Job:
        """Make the job by which a process begins the episode, with a first sample that was drawn before."""
        self.slot = slot
        completion = self.batch.drawn.get(self.key)
        first = self.add_sample(completion, None) if completion else None
        return Job(self.number, self.row, self.seed, first, self.group, group_size)

    def add_ask(self, ask: Ask) -> Request:
        """Record the context that stands before the next sample, and make the request for the sample."""
        if ask.is_fork and not self.turns:
            self.sequences.clear()  # a prompt of its own takes the place of the row's
        if ask.is_fork:
            self.sequences.append([])
        if len(ask.context.token_ids):
            self.sequences[-1].append(ask.context)
        request = self._make_request(ask)
        self.ask = ask
        self.key = self.batch.number, self.number, self.turns, hash(request)
        return request

    def add_sample(self, completion: Completion, calls: ToolCalls | None) -> Sample:
        """Record the sample of a turn, and return it as the process reads it.

        Args:
            calls: the tool calls that a parser found in it; None without a parser.
        """
        has_logprobs = self.ask is not None and self.ask.logprobs
        self.sequences[-1].append(Segment(completion.token_ids, self.turns, (), completion))
        self.turns += 1
        self.ask = None
        return Sample.read(completion, calls, has_logprobs)

    def end(self, default: float, **result: Any) -> None:
        """Record the end of the episode: make its trajectory from ``result``, which are fields of ``Trajectory``.

        The context before a sample that was requested and never came is left out.

        Args:
            default: reward of an episode that failed.
        """
        if self.ask and self.turns and self.sequences[-1][-1].turn == CONTEXT:
            self.sequences[-1].pop()
            if not self.sequences[-1]:
                self.sequences.pop()
        if (failure := result["failure"]) and failure[0] != "no_generation":
            result["rewards"] = ((self.turns - 1, default),)
        verdicts = tuple(verdict for _, verdict in sorted(self.verdicts.items()))
        self.trajectory = Trajectory(self.row, tuple(map(tuple, self.sequences)), verdicts=verdicts, **result)

    def _make_request(self, ask: Ask) -> Request:
        """Make the request for a sample that continues the last sequence. It has the batch's stops beside its own."""
        sampling, segments = self.batch.sampling, self.sequences[-1]
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *ask.stop_token_ids)))
        sampling = replace(sampling, count=1, max_tokens=ask.max_tokens, stop_token_ids=stops)
        images = tuple(image for segment in segments for image in segment.images)
        ids = self.row.prompt_ids  # one object for all episodes of a row, as it is sent
        if len(segments) > 1 or segments[0].token_ids is not ids:
            ids = tuple(np.concatenate([np.asarray(segment.token_ids, np.int32) for segment in segments]).tolist())
        return Request(ids, sampling, images, self.batch.goes_first)


class Losses:
    """Decides which episodes fail with a lost process, and reports the processes that no episode is to blame for.

    Args:
        environment: what it says of itself counts: ``runs_once`` and ``scores_groups``.
        note: is told of each lost process, and raises where the run may not go on; else a warning is logged.
    """

    def __init__(self, environment: Environment, note: NoteFn | None = None):
        self._runs_once = is_run_once(environment)
        self._scores_groups = getattr(environment, "scores_groups", False)
        self._note = note
        self._in_a_row = Counter[int]()

    def note_progress(self, slot: int) -> None:
        """Note that an episode of a slot has asked for something new or has ended."""
        del self._in_a_row[slot]

    def explain_failures(
        self, slot: int, lost: LostWorker, unfinished: Sequence[EpisodeState]
    ) -> dict[int, tuple[str, str]]:
        """Record that the process of a slot was lost, and tell which of its ``unfinished`` episodes fail.

        An episode fails that the process ran when it was lost, once it has been run again ``RERUNS`` times, or if its
        code held the process. With it fail those of its prompt that one call scores. All fail that may run only once.

        Returns:
            number of a failed episode -> kind and message of its failure.

        Raises:
            RunError: processes are lost one after another while no episode runs.
        """
        self._in_a_row[slot] += 1
        ran = [state for state in unfinished if state.number == lost.number]
        for state in ran:
            state.losses.append(lost)
        if not ran and self._in_a_row[slot] >= _LOSSES:
            text = f"{lost.name} {lost.fate}, {_LOSSES} times in a row, while no episode ran"
            raise RunError(f"environment: {text}; environment.log in the run folder shows the cause")
        if not ran:
            self._report(lost)

        failed = [state for state in ran if lost.where or len(state.losses) > RERUNS]
        if self._scores_groups:
            groups = {state.group for state in failed}
            failed = [state for state in unfinished if state.group in groups]
        if self._runs_once and lost.has_begun:
            failed = unfinished
        for state in failed:
            state.losses.clear()  # they are no outages
        kind, message = self._explain(lost)
        return {state.number: (kind, f"turn {state.turns}: {message}") for state in failed}

    def report(self, state: EpisodeState) -> None:
        """Report the processes that were lost at an episode which came to its end in another."""
        for lost in state.losses:
            self._report(lost)

    def _explain(self, lost: LostWorker) -> tuple[str, str]:
        if lost.fate == HELD:
            where = lost.where or "in code that does not let Python look"
            return "blocked", f"it held its process, which had to be ended, {where}"
        fate = lost.fate if lost.fate.startswith(MONITOR) else "died (it exited, crashed or had no memory left)"
        reason = "this environment runs once" if self._runs_once else f"so in {1 + RERUNS} runs"
        return "died", f"its process {fate}, and {reason}"

    def _report(self, lost: LostWorker) -> None:
        if self._note:
            self._note({lost.name: lost.fate})
        else:
            LOGGER.warning(f"environment: {lost.name} {lost.fate}; its episodes are run again")
