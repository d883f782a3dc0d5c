"""Scorers, and the environment of one turn that is made from a scorer.

A scorer is a function or ``async`` function ``reward(text, row) -> float``, or a function marked with ``batch_reward``
that scores all samples of a prompt.
"""

import logging
import re
import reprlib
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isasyncgenfunction, signature
from math import isfinite
from typing import Any

from rlworker.data.rows import Row
from rlworker.environments.episode import Episode, RewardError, read_number
from rlworker.environments.policy import Policy
from rlworker.environments.user_code import describe_error, is_async, name_function, strip_partials

Score = float | Mapping[str, Any]
"""What a scorer returns for a text: a number, or a dict as verl's rewards return, with the number as ``score``."""
RewardFn = Callable[[str, Row], Score | Awaitable[Score]]
BatchRewardFn = Callable[[list[str], list[Row]], Sequence[Score]]
Scorer = RewardFn | BatchRewardFn
AnswerFn = Callable[[str, Row], str | None]
"""``answer(text, row)`` returns the answer in a text, for votes of validation (maj@k); empty or None
if there is none."""
Environment = Callable[[Policy, Row], Awaitable[Episode]]
"""``async def environment(policy, row) -> Episode`` runs one episode."""

_REWARD = re.compile(r"(\w*_)?(reward|score)")
_TEXT = re.compile(r"(text|completion|response|answer|output|solution)s?(_str)?")
"""Names of scorers, and of their first argument."""


def batch_reward(reward: BatchRewardFn) -> BatchRewardFn:
    """Mark ``reward(texts, rows)``, which returns a number per text, as called once for all samples of a prompt."""
    marked: Any = reward
    try:
        marked.batch = True
    except AttributeError:  # a method of an object
        marked = partial(reward)
        marked.batch = True
    return marked


def is_batch(reward: Any) -> bool:
    """Tell whether ``batch_reward`` has marked a function, or the function behind a ``functools.partial``."""
    return getattr(reward, "batch", False) is True or (isinstance(reward, partial) and is_batch(reward.func))


def is_run_once(environment: Any) -> bool:
    """Tell whether an environment, or a function that it calls for rewards, says by ``runs_once = True`` that no
    episode may run twice."""
    functions = [environment.func] if isinstance(environment, partial) else getattr(environment, "scorers", ())
    return getattr(environment, "runs_once", False) is True or any(map(is_run_once, functions))


def exact_match(text: str, row: Row) -> float:
    """Return 1 where the completion equals the row's answer, apart from white space around both, else 0."""
    return float(text.strip() == row.answer.strip())


@dataclass(frozen=True)
class GroupCall:
    """An episode's part in the one call of a batch scorer for all samples of its prompt. Awaiting it gives the
    episode's number.

    ``EnvRunner`` makes the call, outside of any event loop.

    Attributes:
        scorer: the batch scorer. text: the episode's sample.
    """

    scorer: Callable
    text: str

    def __await__(self) -> Generator["GroupCall", Any, Any]:
        return (yield self)


class ScoredTurn:
    """An environment of one turn whose reward functions are known.

    Attributes:
        scorers: the reward functions.
        samples_first: True: the first sample continues the row's prompt, so that the driver requests it before a
            process begins the episode.
    """

    scorers: Sequence[Callable] = ()
    samples_first = True


class OneTurn(ScoredTurn):
    """The environment of a scorer: one sample of the row's prompt, and the scorer's number as its reward.

    Args:
        scorer: the scorer.
        answer: finds the answer in the sample's text, after it was scored.

    Attributes:
        scores_groups: whether one call scores all samples of a prompt, so that they fail together.
        is_immediate: whether the episode awaits nothing after its sample except the numbers of its group.
    """

    def __init__(self, scorer: Scorer, answer: AnswerFn | None = None):
        self.scorer = self.__wrapped__ = scorer
        self.scorers = [scorer]
        self.answer = answer
        self.__qualname__ = name_function(scorer)
        self.scores_groups, self.is_immediate = is_batch(scorer), not is_async(scorer)

    async def __call__(self, policy: Policy, row: Row) -> Episode:
        episode = Episode(row)
        text = (await policy.sample(episode)).text
        scorer: Any = self.scorer
        if self.scores_groups:
            value = await GroupCall(scorer, text)
        else:
            value = scorer(text, row)
            (value,) = spread_numbers(value if self.is_immediate else await value, 1)
        score, parts = split_score(value)
        try:
            episode.reward(score)
        except RewardError as error:
            raise RewardError(error.kind, describe_score(value)) from None
        episode.parts |= parts
        if self.answer:
            episode.answer = find_answer(self.answer, text, row)
        return episode


def one_turn(scorer: Scorer, answer: AnswerFn | None = None) -> Environment:
    """Make the environment of a scorer: one sample, and ``scorer(text, row)`` as its reward.

    Args:
        scorer: a function ``(text, row) -> float``, or one that is marked with ``batch_reward``.
        answer: ``answer(text, row)`` finds the answer in the sample's text; with it, validation votes on answers.

    Raises:
        ValueError: the scorer or ``answer`` cannot be called with two arguments.
    """
    check_reward(scorer)
    if answer:
        check_arguments(answer, "answer(text, row)")
    return OneTurn(scorer, answer)


def make_environment(function: Environment | Scorer) -> Environment:
    """Return an environment as it is, and make ``one_turn`` of a scorer.

    An ``async`` function counts as a scorer where its name, or names and types of its arguments, say that it takes a
    text.

    Raises:
        ValueError: the function can be called as neither.
    """
    if isinstance(function, OneTurn):
        return function
    if is_async(function) and not _takes_text(function):
        check_arguments(function, "environment(policy, row)")
        return function  # pyright: ignore[reportReturnType]  its name and arguments tell it from a scorer
    return one_turn(function)  # pyright: ignore[reportArgumentType]  its name and arguments tell it from an environment


def find_answer(answer: AnswerFn, text: str, row: Row) -> str:
    """Return the answer that a function finds in a text; empty if it finds none or raises.

    A sample without an answer has no vote, and keeps its reward. The error goes to the log of this process.
    """
    try:
        found = answer(text, row)
    except Exception as error:
        name = name_function(answer)
        logging.getLogger(__name__).warning(f"answer: {name} raised, the sample has no vote: {describe_error(error)}")
        return ""
    return "" if found is None else str(found)


def split_score(returned: Any) -> tuple[Any, dict[str, float]]:
    """Split what a scorer returned for a text into its score, which need be no number, and the parts of it.

    A dict with a ``score`` is read as verl reads it: of its other values, those that are numbers are parts.
    """
    if not isinstance(returned, Mapping) or "score" not in returned:
        return returned, {}
    numbers = {str(name): read_number(value) for name, value in returned.items() if name != "score"}
    return returned["score"], {name: number for name, number in numbers.items() if isfinite(number)}


def describe_score(returned: Any) -> str:
    """Describe what a scorer returned in place of a number."""
    got = f"returned {reprlib.repr(returned)}"
    return f'{got}, expected a number, or a dict that has it as "score"' if isinstance(returned, Mapping) else got


def spread_numbers(returned: Any, count: int) -> list[Any]:
    """Return the result of a scorer's call as a list with one value for each of its ``count`` texts.

    Raises:
        RewardError: the result holds another number of values.
    """
    try:
        values = [returned] if isinstance(returned, (float, str, bytes, dict)) else list(returned)
    except TypeError:  # a number
        values = [returned]
    if len(values) != count:
        message = f"returned {len(values)} numbers for {count} texts: {reprlib.repr(returned)}"
        raise RewardError("wrong_count", message)
    return values


def check_reward(reward: Any) -> None:
    """Raise ValueError where a function cannot be a scorer, because of its arguments or because it is a generator."""
    if not callable(reward):
        raise ValueError(f"reward: expected a function reward(text, row) -> float, got {reward!r:.80}")
    if isasyncgenfunction(reward):
        raise ValueError(
            f"reward: {name_function(reward)} is an async generator, and a scorer returns one number; write `async def "
            "reward(text, row) -> float`, or an environment, `async def environment(policy, row) -> Episode`"
        )
    if is_batch(reward) and is_async(reward):
        raise ValueError(
            f"reward: {name_function(reward)} is async and a batch reward; write `def reward(texts, rows)`, or leave "
            "batch_reward out: calls of async scorers run side by side"
        )
    check_arguments(reward, "reward(texts, rows)" if is_batch(reward) else "reward(text, row)")


def check_arguments(function: Callable, call: str) -> None:
    """Raise ValueError if a function cannot be called with two arguments, as in ``call``: ``"reward(text, row)"``."""
    try:
        bound = signature(function, follow_wrapped=False).bind(None, None)  # a wrapper may take other arguments
    except TypeError as error:
        raise ValueError(
            f"{call.partition('(')[0]}: {name_function(function)} cannot be called as {call} ({error}); give further "
            "arguments a default or bind them by functools.partial; fields of a row are in row.source"
        ) from None
    except ValueError:  # a builtin that does not tell
        return
    if call.startswith("reward") and next(iter(bound.arguments)) == "policy":
        raise ValueError(
            f"environment: {name_function(function)} takes a policy and is not async; write `async def "
            "environment(policy, row) -> Episode`"
        )


def _takes_text(function: Any) -> bool:
    """Tell by names and annotations whether an async function is a scorer."""
    called = signature(function)
    first = next(iter(called.parameters.values()), None)
    if first is None:
        return False
    taken, returned = (str(getattr(kind, "__name__", kind)) for kind in (first.annotation, called.return_annotation))
    if first.name == "policy" or "Policy" in taken or "Episode" in returned:
        return False
    is_named = _REWARD.fullmatch(getattr(strip_partials(function), "__name__", "")) or _TEXT.fullmatch(first.name)
    return bool(is_batch(function) or is_named or re.search(r"\bstr\b", taken)) or bool(
        re.search(r"\b(float|int|bool)\b", returned)
    )
