"""Metrics, failures and samples of the groups that a step has drawn."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlworker.environments.codec import Codec
from rlworker.environments.record import Trajectory
from rlworker.rollouts.trajectory import TrajectoryGroup, has_zero_variance

SAMPLES_KEPT = 8
"""Most samples that are stored of a step."""
EXAMPLES = 3
"""Most failures of each kind of which prompt, text and message are kept."""
_OF_THE_MODEL = ("limit", "no_generation")
"""Kinds of failure that the model's text may cause in any environment."""


@dataclass(frozen=True)
class Failure:
    """An episode that failed.

    Attributes:
        kind: one of ``FailureKind``. prompt: text of the row's prompt.
        text: the last sample, decoded; empty without one. message: turn, line and error.
    """

    kind: str
    prompt: str
    text: str
    message: str


@dataclass(frozen=True)
class Scores:
    """Rewards and failures of some episodes.

    Attributes:
        values: the reward of each episode, in order; ``EnvironmentConfig.default_reward`` where it failed.
        failures: kind of failure -> number of episodes; only kinds that occurred.
        examples: the first ``EXAMPLES`` failures of each kind.
    """

    values: list[float]
    failures: dict[str, int]
    examples: list[Failure]

    def count_failures(self, name: str) -> dict[str, int]:
        """Return counts of failures as metrics: ``{name}_failures``, and ``{name}_{kind}`` of kinds that occurred."""
        kinds = {f"{name}_{kind}": count for kind, count in self.failures.items()}
        return {f"{name}_failures": sum(self.failures.values())} | kinds

    @property
    def all_failed(self) -> bool:
        """Tell whether every episode failed for a reason that lies in the environment and not in the model's text."""
        failed = sum(count for kind, count in self.failures.items() if kind not in _OF_THE_MODEL)
        return failed == len(self.values) > 0

    def summarise(self) -> str:
        """Write one line: how many episodes failed, by kind, and the message of the first failure."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
        text = f"{sum(self.failures.values())} of {len(self.values)} episodes failed: {kinds}"
        if self.examples:
            first = self.examples[0]
            on = f"prompt {first.prompt[-80:]!r}" + (f", text {first.text[-80:]!r}" if first.text else "")
            text += f"; {first.kind} on {on}: {first.message}"
        return text


def score_groups(groups: Sequence[TrajectoryGroup], codec: Codec) -> Scores:
    """Collect the rewards ``[P * G]`` of P groups of G finished episodes, and count the episodes that failed."""
    failures, examples = Counter(), []
    trajectories = [trajectory for group in groups for trajectory in group]
    for trajectory in trajectories:
        if trajectory.failure:
            kind, message = trajectory.failure
            failures[kind] += 1
            if failures[kind] <= EXAMPLES:
                completions = trajectory.completions
                text = codec.read_samples([completions[-1].token_ids])[0] if completions else ""
                examples.append(Failure(kind, trajectory.row.prompt, text, message))
    return Scores([trajectory.reward for trajectory in trajectories], dict(failures), examples)


def summarise_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Compute the metrics of all groups that a step has drawn: rewards, lengths, turns and zero-variance groups."""
    trajectories = [trajectory for group in groups for trajectory in group]
    completions = [completion for trajectory in trajectories for completion in trajectory.completions]
    lengths = np.asarray([len(completion.token_ids) for completion in completions], np.int64)
    rewards = torch.tensor([[trajectory.reward for trajectory in group] for group in groups])
    samples, zero_variance = rewards.numel(), sum(map(has_zero_variance, groups))
    return (
        {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(dim=1).mean()) if rewards.shape[1] > 1 else 0.0,
            "groups": len(groups),
            "zero_variance_groups": zero_variance,
            "zero_variance_share": zero_variance / len(groups),
            "completion_tokens": int(lengths.sum()) / samples,
            "truncated": sum(not completion.finished for completion in completions) / max(len(completions), 1),
            "samples": samples,
        }
        | _summarise_episodes(trajectories, lengths)
        | _summarise_verdicts(trajectories)
    )


def _summarise_verdicts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Average the parts of rewards, and count verdicts of served models, of trajectories that have any."""
    metrics: dict[str, float] = {}
    parts = [part for trajectory in trajectories if not trajectory.failure for part in trajectory.parts]
    for name in dict.fromkeys(name for name, _ in parts):
        values = [value for part, value in parts if part == name]
        metrics[f"reward_{name}_mean"] = sum(values) / len(values)
    verdicts = [verdict for trajectory in trajectories for verdict in trajectory.verdicts]
    for name in dict.fromkeys(name for name, _ in verdicts):
        found = [verdict for model, verdict in verdicts if model == name]
        metrics[f"verdicts_{name}"] = len(found) / len(trajectories)
        metrics[f"unreadable_{name}"] = sum(one.unreadable or bool(one.error) for one in found) / len(trajectories)
    return metrics


def _summarise_episodes(trajectories: Sequence[Trajectory], lengths: np.ndarray) -> dict[str, float]:
    """Average counts over trajectories, and find quantiles of the tokens that each sampled.

    Args:
        lengths: of all samples, in the order of the trajectories.
    """
    owners = np.repeat(np.arange(len(trajectories)), [one.turns for one in trajectories])
    sampled = np.bincount(owners, lengths, len(trajectories))
    quantiles = {
        "completion_tokens_p10": float(np.quantile(sampled, 0.1)),
        "completion_tokens_p50": float(np.quantile(sampled, 0.5)),
        "completion_tokens_p90": float(np.quantile(sampled, 0.9)),
        "completion_tokens_max": int(sampled.max()),
    }
    names: dict[str, Callable[[Trajectory], int]] = {
        "turns": lambda one: one.turns,
        "forks": lambda one: one.forks,
        "tool_calls": lambda one: one.tool_calls,
        "tool_failures": lambda one: one.tool_failures,
        "observed_tokens": lambda one: one.observed_tokens,
    }
    counts = {name: sum(map(count, trajectories)) for name, count in names.items()}
    return quantiles | {name: total / len(trajectories) for name, total in counts.items()}


def describe_trajectory(trajectory: Trajectory, codec: Codec) -> dict:
    """Describe a trajectory turn by turn, as a run folder's ``rollouts`` stores it.

    Returns:
        the keys ``prompt``, ``completion``, ``answer``, ``reward``, ``version``, ``outcome`` and ``turns``; and of some
            ``parts`` and ``verdicts``.
    """
    rewards: dict[int, float] = {}
    for turn, value in trajectory.rewards:
        rewards[turn] = rewards.get(turn, 0.0) + value
    turns = []
    for number, segments in enumerate(trajectory.sequences):
        texts = codec.decode_all([segment.token_ids for segment in segments], skip_special=False)
        for place, (segment, text) in enumerate(zip(segments, texts, strict=True)):
            is_sampled = segment.completion is not None
            turn = {"by": "model" if is_sampled else "environment" if number or place else "prompt", "text": text}
            turn |= {"learns": is_sampled, "reward": rewards.get(segment.turn, 0.0) if is_sampled else 0.0}
            turn |= {"fork": True} if number and not place else {}
            turns.append(turn | ({"images": [image.path for image in segment.images]} if segment.images else {}))
    completions = trajectory.completions
    return {
        "prompt": trajectory.row.prompt,
        "completion": "".join(codec.read_samples([completion.token_ids for completion in completions])),
        "answer": trajectory.row.answer,
        "reward": trajectory.reward,
        "version": completions[-1].version if completions else -1,
        "outcome": ": ".join(trajectory.failure) if trajectory.failure else "ok",
        "turns": turns,
    } | _describe_verdicts(trajectory)


def _describe_verdicts(trajectory: Trajectory) -> dict:
    """Describe the parts of a reward, and what served models said; empty where there is neither."""
    parts = {"parts": dict(trajectory.parts)} if trajectory.parts else {}
    lines = [
        {"model": name, "value": one.value, "text": one.error or "\n".join(one.texts)}
        for name, one in trajectory.verdicts
    ]
    return parts | ({"verdicts": lines} if lines else {})
