"""Environments: each samples the policy as often as it likes, and puts observations between its turns."""

from rlworker.environments.episode import Episode, RewardError
from rlworker.environments.policy import EpisodeLimit, Policy, ToolFailure
from rlworker.environments.record import Sample
from rlworker.environments.reward import Environment, Scorer, batch_reward, exact_match, one_turn
from rlworker.environments.tools.calls import answer_calls

__all__ = [
    "Environment",
    "Episode",
    "EpisodeLimit",
    "Policy",
    "RewardError",
    "Sample",
    "Scorer",
    "ToolFailure",
    "answer_calls",
    "batch_reward",
    "exact_match",
    "one_turn",
]
