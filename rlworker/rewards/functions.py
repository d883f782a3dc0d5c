"""Rewards: plain functions ``reward(text, row) -> float``, or of a prompt's whole group with ``@batch_reward``."""

from collections.abc import Callable, Sequence

from rlworker.data.rows import Row

RewardFn = Callable[[str, Row], float]
BatchRewardFn = Callable[[list[str], list[Row]], Sequence[float]]


def batch_reward(reward: BatchRewardFn) -> BatchRewardFn:
    """Mark ``reward(texts, rows) -> one number per text``: it is called once for all completions of a prompt."""
    reward.batch = True
    return reward


def exact_match(text: str, row: Row) -> float:
    """Give 1 where the completion, blanks around it aside, is the row's answer, else 0."""
    return float(text.strip() == row.answer.strip())
