"""Scorers and the one-turn environment: ``reward(text, row) -> float``, or of a prompt's whole group by
``@batch_reward``.

A scorer is a function, an ``async`` function, or a function marked with ``batch_reward``.
"""

import re
import reprlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isasyncgenfunction, signature
from typing import Any

from rlworker.data.rows import Row
from rlworker.environments.episode import Episode, RewardError
from rlworker.environments.policy import Policy
from rlworker.environments.user_code import is_async, name_function, strip_partials

RewardFn = Callable[[str, Row], float | Awaitable[float]]
BatchRewardFn = Callable[[list[str], list[Row]], Sequence[float]]
Scorer = RewardFn | BatchRewardFn
AnswerFn = Callable[[str, Row], str]
"""``answer(text, row)`` finds the answer in a text, by which answers are voted on; empty where there is none."""
Environment = Callable[[Policy, Row], Awaitable[Episode]]
"""``async def environment(policy, row) -> Episode``."""

_REWARD = re.compile(r"(\w*_)?(reward|score)")
_TEXT = re.compile(r"(text|completion|response|answer|output|solution)s?(_str)?")
"""Names of scorers, and of their first argument."""


def batch_reward(reward: BatchRewardFn) -> BatchRewardFn:
    """Mark ``reward(texts, rows) -> one number per text``: it is called once for all samples of a prompt."""
    marked: Any = reward
    try:
        marked.batch = True
    except AttributeError:  # a method of an object
        marked = partial(reward)
        marked.batch = True
    return marked


def is_batch(reward: Any) -> bool:
    """Tell whether ``batch_reward`` has marked a function, or what it is a ``functools.partial`` of."""
    return getattr(reward, "batch", False) is True or (isinstance(reward, partial) and is_batch(reward.func))


def exact_match(text: str, row: Row) -> float:
    """Give 1 where the completion, blanks around it aside, is the row's answer, else 0."""
    return float(text.strip() == row.answer.strip())


@dataclass(frozen=True)
class GroupCall:
    """An episode's part in the call of a batch scorer for all samples of its prompt; awaits the episode's number.

    ``EnvRunner`` makes the call, outside of any event loop.
    """

    scorer: Callable
    text: str

    def __await__(self) -> Generator["GroupCall", Any, Any]:
        return (yield self)


class OneTurn:
    """The environment of a scorer: one sample of the row's prompt, and the scorer's number as its reward.

    Args:
        answer: finds the answer in the sample's text, after it was scored.

    Attributes:
        samples_first: its first sample continues the row's prompt, so that the driver asks for it before a process
            begins the episode. scores_groups: one call scores all samples of a prompt, which fail together.
        is_immediate: from its sample on it awaits nothing but the numbers of its group.
    """

    samples_first = True

    def __init__(self, scorer: Scorer, answer: AnswerFn | None = None):
        self.scorer = self.__wrapped__ = scorer
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
        try:
            episode.reward(value)
        except RewardError as error:
            raise RewardError(error.kind, f"returned {reprlib.repr(value)}") from None
        if self.answer:
            episode.answer = self.answer(text, row)
        return episode


def one_turn(scorer: Scorer, answer: AnswerFn | None = None) -> Environment:
    """Make the environment of a scorer: one sample, and ``scorer(text, row)`` as its reward.

    Args:
        answer: ``answer(text, row)`` finds the answer in the sample's text; with it, validation votes on answers.

    Raises:
        ValueError: one of them cannot be called so.
    """
    check_reward(scorer)
    if answer:
        check_arguments(answer, "answer(text, row)")
    return OneTurn(scorer, answer)


def make_environment(function: Environment | Scorer) -> Environment:
    """Return an environment as it is, and of a scorer its ``one_turn``.

    An ``async`` function is a scorer where its name, or the names and types of its arguments, say that it takes a text.

    Raises:
        ValueError: it can be called as neither.
    """
    if isinstance(function, OneTurn):
        return function
    if is_async(function) and not _takes_text(function):
        check_arguments(function, "environment(policy, row)")
        return function  # pyright: ignore[reportReturnType]  its name and arguments tell it from a scorer
    return one_turn(function)  # pyright: ignore[reportArgumentType]  its name and arguments tell it from an environment


def spread_numbers(returned: Any, count: int) -> list[Any]:
    """Spread the result of a scorer's call over its ``count`` texts.

    Raises:
        RewardError: it holds another number of values.
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
    """Raise ValueError where a function cannot be a scorer, by its arguments or as it yields."""
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
    """Raise ValueError where a function does not take two arguments, as in ``call``: ``"reward(text, row)"``."""
    try:
        signature(function, follow_wrapped=False).bind(None, None)  # a wrapper may take other arguments
    except TypeError as error:
        raise ValueError(
            f"{call.partition('(')[0]}: {name_function(function)} is called as {call}, which it does not take "
            f"({error}); give the rest a default or bind it by functools.partial; fields of a row are in row.source"
        ) from None
    except ValueError:  # a builtin that does not tell
        return


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
