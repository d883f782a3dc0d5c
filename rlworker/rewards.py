"""Rewards: plain functions ``reward(text, row) -> float``."""

from collections.abc import Callable

from rlworker.data import Row

RewardFn = Callable[[str, Row], float]


def exact_match(text: str, row: Row) -> float:
    """1 where the completion, blanks around it aside, is the row's answer, else 0."""
    return float(text.strip() == row.answer.strip())
