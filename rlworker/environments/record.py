"""The trajectory of an episode, and the messages between the driver and the processes that run environments.

A message may be of thousands of episodes, each an entry of its columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from engines.batch.samples import Completion, Completions, Image, TokenSequence
from rlworker.data.rows import Row

if TYPE_CHECKING:  # most environments have no tools
    from engines.vllm.tools import ToolCalls

CONTEXT = -1
"""Turn of a segment that no turn sampled: prompt and observations."""

IDLE = -1
"""Number of an episode that a process reports when it takes a step of none."""
HELD = "got no further and was ended"
"""The end of a process that an environment held, or that hung."""

FailureKind = Literal[
    "timeout", "blocked", "raised", "limit", "no_generation", "no_episode", "died",
    "not_a_number", "too_large", "wrong_count",
]  # fmt: skip
"""How an environment failed. ``timeout``: it awaited for too long something other than a sample; ``blocked``: it held
its process for too long; ``raised``: an exception; ``limit``: it sampled past its turns or tokens; ``no_generation``:
it returned before it sampled; ``no_episode``: it returned something else; ``died``: its process did. Of rewards:
``not_a_number``; ``too_large``, beyond ``LARGEST_REWARD``; ``wrong_count``, too many or too few numbers of a call."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one author.

    Attributes:
        token_ids: ``[T]``. turn: number of the turn that sampled them, ``CONTEXT`` for what the environment wrote.
        images: those whose image tokens are among them, in order.
        completion: what was sampled, where it was.
    """

    token_ids: Sequence[int] | np.ndarray
    turn: int = CONTEXT
    images: tuple[Image, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The trajectory of an episode: the segments of its turns, its rewards and its failure.

    Attributes:
        row: the question. sequences: the segments of each sequence, in order; every fork began another.
        rewards: turn (``CONTEXT`` before the first) and value of each reward.
        failure: kind, and a message with turn and line; None where the environment returned well.
        forks: times that context was rewritten.
        tool_calls, tool_failures: tools that it called, and those of them that returned nothing.
    """

    row: Row
    sequences: tuple[tuple[Segment, ...], ...]
    rewards: tuple[tuple[int, float], ...] = ()
    failure: tuple[FailureKind, str] | None = None
    forks: int = 0
    tool_calls: int = 0
    tool_failures: int = 0

    @property
    def reward(self) -> float:
        """The whole reward: the sum of all."""
        return sum((value for _, value in self.rewards), 0.0)

    @property
    def completions(self) -> list[Completion]:
        """Its samples, turn by turn."""
        return [
            segment.completion for segments in self.sequences for segment in segments if segment.completion is not None
        ]

    @property
    def turns(self) -> int:
        """Samples of the episode."""
        return len(self.completions)

    @property
    def is_one_turn(self) -> bool:
        """Tell whether it is one sample of its row's prompt, and nothing else."""
        first = self.sequences[0]
        return len(self.sequences) == 1 and len(first) == 2 and first[0].token_ids is self.row.prompt_ids

    @property
    def observed_tokens(self) -> int:
        """Tokens that the environment wrote after the prompt, in all sequences."""
        segments = [segment for segments in self.sequences for segment in segments[1:] if segment.turn == CONTEXT]
        return sum(len(segment.token_ids) for segment in segments)

    def list_sequences(self) -> list[TokenSequence]:
        """List its sequences in columns, of which batches are made."""
        places = {CONTEXT: (0, -1)}  # turn -> sequence, and place of the last token that it sampled
        for number, segments in enumerate(self.sequences):
            ends = np.cumsum([len(segment.token_ids) for segment in segments]).tolist()
            places |= {segment.turn: (number, end - 1) for segment, end in zip(segments, ends) if segment.completion}
        rewards: list[list[tuple[int, float]]] = [[] for _ in self.sequences]
        for turn, value in self.rewards:
            number, place = places[turn]
            rewards[number].append((place, value))
        return [_lay_out(segments, tuple(own)) for segments, own in zip(self.sequences, rewards, strict=True)]


def _lay_out(segments: Sequence[Segment], rewards: tuple[tuple[int, float], ...]) -> TokenSequence:
    lengths = [len(segment.token_ids) for segment in segments]
    turns = np.repeat(np.asarray([segment.turn for segment in segments], np.int32), lengths)
    sampled = turns != CONTEXT
    logprobs, versions = np.zeros(len(turns), np.float32), np.full(len(turns), -1, np.int32)
    top_ids, top_logprobs = None, None
    if completions := [segment.completion for segment in segments if segment.completion]:
        joined = Completions.join(completions)
        top_ids, top_logprobs = joined.top_ids, joined.top_logprobs
        if len(joined.logprobs):  # none where they were drawn greedily
            logprobs[sampled] = joined.logprobs
        versions[sampled] = np.repeat(joined.span_versions, joined.span_lengths)
    token_ids = np.concatenate([np.asarray(segment.token_ids, np.int32) for segment in segments])
    images = tuple(image for segment in segments for image in segment.images)
    return TokenSequence(token_ids, sampled, logprobs, versions, turns, rewards, images, top_ids, top_logprobs)


class Answer(NamedTuple):
    """A sample, as an environment is given it.

    Attributes:
        token_ids: ``[T]`` int32. finished: as a ``Completion``'s. calls: what a parser found in it, where one was
            asked.
    """

    token_ids: np.ndarray
    finished: bool
    calls: ToolCalls | None = None


class Job(NamedTuple):
    """An episode to be run.

    Attributes:
        number: among all that run. row: key of its row. seed: of its random numbers.
        answers: its samples until now, each after the digest of the context that it followed.
        tools: the outcomes of its tool calls until now, by the number of the call.
        group: number of its prompt's first episode. group_size: episodes of the prompt.
    """

    number: int
    row: int
    seed: tuple[int, ...]
    answers: Sequence[tuple[int, Answer]]
    tools: dict[int, bytes]
    group: int
    group_size: int


@dataclass(frozen=True)
class Message:
    """A message to a process: jobs to begin with their rows, and samples for the episodes that wait.

    Attributes:
        longest_s: seconds after which the process replies although some episodes neither wait nor have ended; None
            sets no limit.
        numbers: ``[n]``, the episodes that are answered. token_ids: ``[T]`` int32, of all answers end to end.
        lengths: ``[n]``. finished: ``[n]``. calls: by number, where a parser was asked.
    """

    rows: dict[int, Row] = field(default_factory=dict)
    jobs: Sequence[Job] = ()
    numbers: Sequence[int] = ()
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    lengths: Sequence[int] = ()
    finished: Sequence[bool] = ()
    calls: dict[int, ToolCalls] = field(default_factory=dict)
    longest_s: float | None = None

    def list_answers(self) -> list[tuple[int, Answer]]:
        """List the answers by number."""
        parts = np.split(self.token_ids, np.cumsum(self.lengths)[:-1]) if self.numbers else []
        return [
            (number, Answer(ids, finished, self.calls.get(number)))
            for number, ids, finished in zip(self.numbers, parts, self.finished, strict=True)
        ]


class EpisodeResult(NamedTuple):
    """The end of an episode, in the words of ``Trajectory``. What was observed after the last sample is left out:
    the model has not seen it."""

    number: int
    rewards: tuple[tuple[int, float], ...]
    failure: tuple[FailureKind, str] | None
    forks: int = 0
    tool_calls: int = 0
    tool_failures: int = 0


@dataclass
class Reply:
    """A reply of a process: the samples that its episodes ask for, and the episodes that have ended.

    Attributes:
        numbers: ``[n]``, the episodes that ask. forks: ``[n]``, the context is a new one rather than a continuation.
        lengths: ``[n]``, ids of context that came since the last sample, or of all of a new one.
        token_ids: ``[T]`` int32, those ids end to end. max_tokens: ``[n]``.
        images, stops, parsers: by number where there are some: images of the context, further stop tokens, and name of
            a parser with the tools' schemas.
        results: of episodes that have ended. tools: episode, number of the call and outcome of each tool call.
        runs_on: some episodes neither wait nor have ended.
    """

    numbers: list[int] = field(default_factory=list)
    forks: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    max_tokens: list[int] = field(default_factory=list)
    images: dict[int, tuple[Image, ...]] = field(default_factory=dict)
    stops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parsers: dict[int, tuple[str, tuple]] = field(default_factory=dict)
    results: list[EpisodeResult] = field(default_factory=list)
    tools: list[tuple[int, int, bytes]] = field(default_factory=list)
    runs_on: bool = False


@dataclass(frozen=True)
class LostWorker:
    """A process that died or was ended; another has been started in its place.

    Attributes:
        name: by which messages call it. fate: what became of it.
        number, turn: the episode that it was at; ``IDLE`` where it was at none.
        where: the line at which an environment held it; empty where that is not known.
    """

    name: str
    fate: str
    number: int
    turn: int
    where: str


def digest_ids(token_ids: Sequence[int] | np.ndarray) -> int:
    """Digest ids, to tell whether a context is the same when it is made again."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int32).tobytes()) if len(token_ids) else 0
