"""The processes of an RL run: training engines, which of them share some, and the scorers or players."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from engines.models.spec import ModelSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.workers import Role
from rlworker.config.run import RunConfig
from rlworker.episodes.codec import Codec
from rlworker.episodes.model import Play, is_play
from rlworker.episodes.processes.pool import EPISODE_LOG, PlayPool
from rlworker.rewards.functions import BatchRewardFn, RewardFn
from rlworker.rewards.pool import REWARD_LOG, RewardPool
from rlworker.rollouts.plays import Player, set_limits
from rlworker.rollouts.sampler import STREAM
from rlworker.rollouts.stream.stream import Stream


def list_groups(config: RunConfig, models: Mapping[str, ModelSpec]) -> Iterator[tuple[str, str, tuple[Role, ...], int]]:
    """List name, platform, engines and seed of each group of training processes, the actor's first.

    Args:
        models: by role.
    """
    actor = "actor", models["actor"], config.actor_of_run, config.rollout.temperature
    roles = {"actor": Role(*actor, needs_topk_logprobs=config.algorithm.score_centering > 0)}
    if "reference" in models:
        cpu_offload = "reference" in config.placement.cpu_offload
        settings = config.actor_of_run, config.rollout.temperature, False, cpu_offload
        roles["reference"] = Role("reference", models["reference"], *settings)
    if "critic" in models:
        roles["critic"] = Role("critic", models["critic"], config.critic_of_run)
    shared = tuple(role for name, role in roles.items() if name not in config.placement.dedicated_devices)
    yield "actor", config.platform, shared, config.seed
    for name in dict.fromkeys(config.placement.dedicated_devices):
        yield name, config.platform, (roles[name],), config.seed


def start_scorer(
    start: Callable,
    config: RunConfig,
    reward: RewardFn | BatchRewardFn | Play,
    codec: Codec,
    rollouts: Rollouts,
    folder: Path,
) -> RewardPool | Player:
    """Start the processes that score completions, or those that play episodes with the rollout engines.

    Args:
        start: starts processes as the run's own. folder: of the run, for what they print.
    """
    if not is_play(reward):
        return start(RewardPool(cast(Any, reward), config.reward, folder / REWARD_LOG))
    pool = PlayPool(cast(Any, reward), codec, set_limits(config), config.episodes.workers, folder / EPISODE_LOG)
    return Player(codec, start(pool), rollouts, config.reward.default)


@contextmanager
def running_stream(
    config: RunConfig, rollouts: Rollouts, scorer: RewardPool | Player, tokenizer: Any
) -> Iterator[Stream | None]:
    """Draw ahead of the trainer in this context, where rollouts may; it ends before the processes that it uses."""
    if not config.rollout.staleness:
        yield None
        return
    with Stream(rollouts, scorer, tokenizer, (config.seed, 0, STREAM)) as stream:
        yield stream
