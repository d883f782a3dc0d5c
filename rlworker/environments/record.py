"""The trajectory of an episode, and what the driver and the processes that run environments send each other.

The driver sends jobs to begin, and by number the samples of episodes that wait. A process answers with a ``Reply``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from engines.batch.samples import Completion, Image
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
        answer: as ``Episode`` has it.
    """

    row: Row
    sequences: tuple[tuple[Segment, ...], ...]
    rewards: tuple[tuple[int, float], ...] = ()
    failure: tuple[FailureKind, str] | None = None
    forks: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    answer: str = ""

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
    def observed_tokens(self) -> int:
        """Tokens that the environment wrote after the prompt, in all sequences."""
        segments = [segment for segments in self.sequences for segment in segments[1:] if segment.turn == CONTEXT]
        return sum(len(segment.token_ids) for segment in segments)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model wrote, as vLLM's parser of the model read it.

    Attributes:
        arguments: by name.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of the model.

    Attributes:
        text: decoded, without special tokens; empty until the sample has reached its environment's process.
        token_ids: ``[T]`` int32, the stop token included.
        finished: ended by a stop token; False where it was cut at its length limit.
        calls: the tool calls in it, where the episode names a parser.
        call_error: why a call cannot be read, and then none counts; empty where all can, and where there is none.
    """

    text: str
    token_ids: np.ndarray
    finished: bool
    calls: tuple[ToolCall, ...] = ()
    call_error: str = ""

    @classmethod
    def read(cls, completion: Completion, found: ToolCalls | None) -> Sample:
        """Make a sample of a completion and what a parser found in it."""
        calls = tuple(ToolCall(name, json.loads(arguments)) for name, arguments in found.calls) if found else ()
        return cls("", completion.token_ids, completion.finished, calls, found.error if found else "")


class Job(NamedTuple):
    """An episode to be run.

    Attributes:
        number: among all that run. row: the question. seed: of its random numbers.
        samples: those until now, each after the digest of the context that it followed.
        tools: the outcomes of its tool calls until now, by the number of the call.
        group: number of its prompt's first episode. group_size: episodes of the prompt.
    """

    number: int
    row: Row
    seed: tuple[int, ...]
    samples: Sequence[tuple[int, Sample]]
    tools: dict[int, bytes]
    group: int
    group_size: int


class Ask(NamedTuple):
    """A sample that an episode asks for.

    Attributes:
        number: of the episode. context: what came since the last sample, or the whole of a new sequence (``is_fork``).
        max_tokens: the length limit. stop_token_ids: further ones. parser: of tool calls in the sample, by name, and
            the tools' schemas; None where there is none to parse.
    """

    number: int
    is_fork: bool
    context: Segment
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    parser: tuple[str, tuple] | None = None


@dataclass
class Reply:
    """A reply of a process.

    Attributes:
        asks: of episodes that wait for a sample. results: by number, of episodes that have ended, the fields of their
            trajectories beside row and sequences. tools: episode, number of the call and outcome of each tool call.
        runs_on: some episodes neither wait nor have ended.
    """

    asks: list[Ask] = field(default_factory=list)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
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
