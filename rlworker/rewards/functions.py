"""Rewards: plain functions ``reward(text, row) -> float``, or of a prompt's whole group with ``@batch_reward``."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import isasyncgenfunction, signature
from typing import Any

from rlworker.data.rows import Row
from rlworker.rewards.user_code import is_async, name_function

RewardFn = Callable[[str, Row], float]
BatchRewardFn = Callable[[list[str], list[Row]], Sequence[float]]


def batch_reward(reward: BatchRewardFn) -> BatchRewardFn:
    """Mark ``reward(texts, rows) -> one number per text``: it is called once for all completions of a prompt."""
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


def read_number(value: Any) -> float:
    """Read what is meant for a reward: whatever ``float`` takes but for text; NaN where it is no number."""
    try:
        return float("nan" if isinstance(value, (str, bytes, bytearray)) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return float("nan")


def check_reward(reward: Any) -> None:
    """Raise ValueError where a function cannot be a reward: it is async, or takes other arguments."""
    if not callable(reward):
        raise ValueError(f"reward: expected a function reward(text, row) -> float, got {reward!r:.80}")
    if is_async(reward) or isasyncgenfunction(reward):
        raise ValueError(
            f"reward: {name_function(reward)} is async, and nobody awaits a reward; write `def reward(text, row) -> "
            "float`. An environment that awaits samples and tools is a play: `async def play(model, row) -> Episode`"
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
