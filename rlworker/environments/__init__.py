"""Environments: each samples the policy as often as it likes, and puts observations between its turns."""

from rlworker.environments.episode import Episode, RewardError
from rlworker.environments.policy import EpisodeLimit, NoVerdict, Policy, ToolFailure
from rlworker.environments.record import Sample, Verdict
from rlworker.environments.reward import Environment, Scorer, batch_reward, exact_match, one_turn

__all__ = [
    "Environment",
    "Episode",
    "EpisodeLimit",
    "NoVerdict",
    "Policy",
    "RewardError",
    "Sample",
    "Scorer",
    "ToolFailure",
    "Verdict",
    "batch_reward",
    "exact_match",
    "one_turn",
]
