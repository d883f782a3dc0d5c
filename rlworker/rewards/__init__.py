"""Reward functions, and the processes that call them."""

from rlworker.rewards.functions import BatchRewardFn, RewardFn, batch_reward, exact_match

__all__ = ["BatchRewardFn", "RewardFn", "batch_reward", "exact_match"]
