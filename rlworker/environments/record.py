"""The trajectory of an episode, and the messages between the driver and the processes that run environments.

The driver sends a process jobs to begin, and the samples and verdicts that its episodes wait for. The process answers
with a ``Reply``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import fsum, isclose
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from engines.batch.samples import Completion, Image
from rlworker.data.rows import Row

if TYPE_CHECKING:  # most environments have no tools
    from engines.vllm.tools import ToolCalls

CONTEXT = -1
"""Turn of a segment that the model did not sample: a prompt or an observation."""

IDLE = -1
"""Number that a process reports in place of an episode's number while no episode takes a step."""
HELD = "got no further and was ended"
"""How a process ended that an environment held, or that hung."""

FailureKind = Literal[
    "timeout", "blocked", "raised", "limit", "no_generation", "no_episode", "died",
    "not_a_number", "too_large", "wrong_count", "no_verdict",
]  # fmt: skip
"""How an environment failed.

``timeout``: it waited too long for something other than a sample or a tool. ``blocked``: it held its process for too
long. ``raised``: it raised an exception. ``limit``: it sampled past its turns or tokens. ``no_generation``: it returned
before it sampled. ``no_episode``: it did not return its ``Episode``. ``died``: its process died. Failures of a reward:
``not_a_number``; ``too_large``, beyond ``LARGEST_REWARD``; ``wrong_count``, a call that returned too many or too few
numbers; ``no_verdict``, a judge that could not be read or a question that no model could be asked.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one author.

    Attributes:
        token_ids: ``[T]``.
        turn: number of the turn that sampled them; ``CONTEXT`` for tokens of the environment.
        images: the images whose image tokens are among them, in order.
        completion: the completion, where the tokens were sampled; else None.
    """

    token_ids: Sequence[int] | np.ndarray
    turn: int = CONTEXT
    images: tuple[Image, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a served model to one question. ``Policy.judge`` and ``Policy.score`` return it.

    Attributes:
        value: a judge's verdict from 0 to 1, or a classifier's logit; of a token classification that of the last token.
        texts: what a judge wrote, a text for each criterion.
        values: the logit of every token, of a token classification; of a judge the verdict on each criterion.
        unreadable: number of answers that could not be read, retries aside.
        error: why there is no value; empty where there is one.
    """

    value: float = 0.0
    texts: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    unreadable: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The trajectory of an episode: the segments of its turns, its rewards and its failure.

    Attributes:
        row: the question.
        sequences: the segments of each sequence, in order; every fork began a new sequence.
        rewards: for each reward, the turn (``CONTEXT`` before the first sample) and the value.
        failure: kind, and a message with turn and line; None where the environment did not fail.
        forks: number of times that the context was rewritten.
        tool_calls, tool_failures: number of tool calls, and of tool calls that failed.
        answer: ``Episode.answer``.
        parts: ``Episode.parts``, as pairs.
        verdicts: for each question to a served model, the name of the model and the verdict.
        notes: what the user should be told of, once a run.
    """

    row: Row
    sequences: tuple[tuple[Segment, ...], ...]
    rewards: tuple[tuple[int, float], ...] = ()
    failure: tuple[FailureKind, str] | None = None
    forks: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    answer: str = ""
    parts: tuple[tuple[str, float], ...] = ()
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reward(self) -> float:
        """The reward of the episode: the sum of all its rewards, rounded once."""
        return fsum(value for _, value in self.rewards)

    @property
    def completions(self) -> list[Completion]:
        """The completions of the episode, one for each turn."""
        return [
            segment.completion for segments in self.sequences for segment in segments if segment.completion is not None
        ]

    @property
    def turns(self) -> int:
        """Number of samples of the episode."""
        return len(self.completions)

    @property
    def observed_tokens(self) -> int:
        """Number of tokens that the environment wrote after the prompt, in all sequences."""
        segments = [segment for segments in self.sequences for segment in segments[1:] if segment.turn == CONTEXT]
        return sum(len(segment.token_ids) for segment in segments)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model wrote, as vLLM's parser for the model read it.

    Attributes:
        name: name of the tool. arguments: name of an argument -> value.
        id: nine letters and digits, as some chat templates demand, by which a result names its call; the same if the
            episode is run again.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of the model. ``Policy.sample`` returns it.

    Attributes:
        text: decoded text, without special tokens; empty until the sample has reached its environment's process.
        token_ids: ``[T]`` int32, the stop token included.
        finished: True where a stop token ended it; False where it was cut at its length limit.
        calls: the tool calls in it, where the episode names a ``tool_parser``.
        call_error: why the tool calls cannot be read, in which case ``calls`` is empty; empty where there is no error.
        content: the text beside ``calls``; empty where there are none.
        logprobs: ``[T]`` float32, log-probability of each id at the sampling temperature, where ``Episode.logprobs`` is
            set; ``[0]`` where it was sampled greedily, else None.
    """

    text: str
    token_ids: np.ndarray
    finished: bool
    calls: tuple[ToolCall, ...] = ()
    call_error: str = ""
    content: str = ""
    logprobs: np.ndarray | None = None

    @classmethod
    def read(cls, completion: Completion, found: ToolCalls | None, logprobs: bool = False) -> Sample:
        """Make a sample from a completion, with its logprobs or without, and the tool calls that a parser found."""
        sample = cls("", completion.token_ids, completion.finished, logprobs=completion.logprobs if logprobs else None)
        if not found:
            return sample
        calls = tuple(ToolCall(name, json.loads(arguments)) for name, arguments in found.calls)
        return replace(sample, calls=calls, call_error=found.error, content=found.content if calls else "")

    def number_calls(self, turn: int) -> Sample:
        """Return the sample of a turn, from 0, with an id for each of its calls."""
        calls = (replace(call, id=name_call(turn, number)) for number, call in enumerate(self.calls))
        return replace(self, calls=tuple(calls)) if self.calls else self


class Job(NamedTuple):
    """An episode to be run.

    Attributes:
        number: number of the episode. row: the question. seed: seed of the episode's random numbers.
        sample: the first sample, if it was drawn before; it continues the row's prompt.
        group: number of the first episode of the same prompt. group_size: number of episodes of the prompt.
    """

    number: int
    row: Row
    seed: tuple[int, ...]
    sample: Sample | None
    group: int
    group_size: int


Answers = dict[int, Sample | Verdict]
"""The samples and verdicts that an episode waits for, by the numbers of its asks and questions."""


class Question(NamedTuple):
    """An episode's question to a served model.

    Attributes:
        number: number of the episode. call: number of the question among all that the episode asks for.
        model: name of the model.
        content: fields of a judge's prompt by name; for a classifier a text, or chat messages.
    """

    number: int
    call: int
    model: str
    content: Any


class Ask(NamedTuple):
    """An episode's request for a sample.

    Attributes:
        number: number of the episode. call: number of the request among all that the episode asks for.
        is_fork: whether ``context`` begins a new sequence.
        context: the tokens since the last sample, or with ``is_fork`` the whole new sequence.
        max_tokens: most tokens of the sample.
        stop_token_ids: ids that end the sample, in addition to those of the run.
        parser: name of the tool-call parser and schemas of the tools; None where the sample is not parsed.
        logprobs: whether the sample comes with its logprobs.
    """

    number: int
    call: int
    is_fork: bool
    context: Segment
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    parser: tuple[str, tuple] | None = None
    logprobs: bool = False


@dataclass
class Reply:
    """A reply of a process to the driver.

    Attributes:
        asks: requests for samples and questions, of the episodes that wait for them.
        results: number of an ended episode -> fields of its ``Trajectory``, except row and sequences.
        runs_on: whether some episodes still run, neither waiting for a sample or a verdict nor ended.
    """

    asks: list[Ask | Question] = field(default_factory=list)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    runs_on: bool = False


@dataclass(frozen=True)
class LostWorker:
    """A process that died or was ended. Another process has been started in its place.

    Attributes:
        name: name of the process in messages. fate: how it ended.
        number: the episode that it was running; ``IDLE`` if it ran none.
        where: the line at which an environment held it; empty if that is not known.
        has_begun: whether it may have begun its episodes.
    """

    name: str
    fate: str
    number: int
    where: str = ""
    has_begun: bool = True


def is_pass(reward: float, pass_reward: float) -> bool:
    """Tell whether a reward reaches ``EnvironmentConfig.pass_reward``, apart from the rounding of its parts' sum."""
    return reward >= pass_reward or isclose(reward, pass_reward, rel_tol=1e-9, abs_tol=1e-9)


def name_call(turn: int, number: int) -> str:
    """Return the id of a turn's tool call, both from 0: nine letters and digits."""
    return f"call{turn % 1000:03}{number % 100:02}"
