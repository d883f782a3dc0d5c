"""The processes of an RL run: training engines, which of them share some, and the loop of rollouts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engines.models.spec import ModelSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.workers import Role
from rlworker.config.run import RunConfig
from rlworker.environments.codec import Codec
from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.pool import ProcessPool
from rlworker.environments.reward import Environment
from rlworker.rollouts.loop import RolloutLoop
from rlworker.rollouts.manager import STREAM


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


@contextmanager
def running_loop(
    config: RunConfig, environment: Environment, pool: ProcessPool, rollouts: Rollouts, codec: Codec
) -> Iterator[RolloutLoop]:
    """Run the loop of rollouts in this context: ahead of the trainer where samples may be stale, else in turns."""
    if config.rollout.staleness:
        from rlworker.rollouts.requests import RequestQueue

        queue = RequestQueue(rollouts, (config.seed, 0, STREAM))
    else:
        from rlworker.rollouts.turn_queue import TurnQueue

        queue = TurnQueue(rollouts)
    with RolloutLoop(environment, pool, rollouts, queue, codec, config.environment.default_reward) as loop:
        yield loop


def set_limits(config: RunConfig) -> EpisodeLimits:
    """Set the limits of an episode by a run's settings."""
    environment = config.environment
    return EpisodeLimits(
        environment.turns,
        environment.tokens or config.longest,
        config.rollout.max_new_tokens,
        environment.time_limit_s,
        environment.tool_limit_s,
    )
