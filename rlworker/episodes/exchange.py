"""What driver and play processes tell each other in a round: columns, since a round may be of thousands of episodes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.batch.samples import Image
from engines.vllm.tools import ToolCalls
from rlworker.data.rows import Row
from rlworker.episodes.record import FailureKind


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample, as a play is given it.

    Attributes:
        token_ids: ``[T]`` int32. finished: as a ``Completion``'s. calls: what a parser found in it, where one was
            asked.
    """

    token_ids: np.ndarray
    finished: bool
    calls: ToolCalls | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """An episode to be played.

    Attributes:
        number: among all that are played together. row: key of its row. seed: of its random numbers.
        answers: what it was given before its process was lost, each after the digest of the context that it followed.
        tools: the outcomes of its tools until then, by the number of the call.
    """

    number: int
    row: int
    seed: tuple[int, ...]
    answers: Sequence[tuple[int, Answer]] = ()
    tools: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    """What a process is told: rows and jobs to begin, and answers to those that wait.

    Attributes:
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

    def list_answers(self) -> list[tuple[int, Answer]]:
        """List the answers by number."""
        parts = np.split(self.token_ids, np.cumsum(self.lengths)[:-1]) if self.numbers else []
        return [
            (number, Answer(ids, finished, self.calls.get(number)))
            for number, ids, finished in zip(self.numbers, parts, self.finished, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended, in the words of ``EpisodeRecord``. What was observed after the last sample is left out: the
    model has not seen it."""

    number: int
    rewards: tuple[tuple[int, float], ...]
    failure: tuple[FailureKind, str] | None
    forks: int = 0
    tool_calls: int = 0
    tool_failures: int = 0


@dataclass
class Requests:
    """Samples that are asked for.

    Attributes:
        numbers: ``[n]``, the episodes that ask. forks: ``[n]``, the context is a new one rather than a continuation.
        lengths: ``[n]``, ids of context that came since the last sample, or of all of a new one.
        token_ids: ``[T]`` int32, those ids end to end. max_tokens: ``[n]``.
        images, stops, parsers: by number where there are some: images of the context, further stop tokens, and name of
            a parser with the tools' schemas.
    """

    numbers: list[int] = field(default_factory=list)
    forks: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    max_tokens: list[int] = field(default_factory=list)
    images: dict[int, tuple[Image, ...]] = field(default_factory=dict)
    stops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parsers: dict[int, tuple[str, tuple]] = field(default_factory=dict)


@dataclass
class Reply:
    """What a process tells when all its plays wait for a sample or have ended.

    Attributes:
        tools: episode, number of the call and outcome of each tool that was called.
    """

    requests: Requests = field(default_factory=Requests)
    endings: list[Ending] = field(default_factory=list)
    tools: list[tuple[int, int, bytes]] = field(default_factory=list)


def digest_ids(token_ids: Sequence[int] | np.ndarray) -> int:
    """Digest ids, to tell whether a context is the same when it is made again."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int32).tobytes())
