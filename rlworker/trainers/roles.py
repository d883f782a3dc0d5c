"""The training engines of an RL run, and which of them share processes."""

from collections.abc import Iterator, Mapping

from engines.models.spec import ModelSpec
from rlworker.cluster.workers import Role
from rlworker.config.run import RunConfig


def list_groups(config: RunConfig, models: Mapping[str, ModelSpec]) -> Iterator[tuple[str, str, tuple[Role, ...], int]]:
    """List name, platform, engines and seed of each group of training processes, the actor's first.

    Args:
        models: by role.
    """
    actor = "actor", models["actor"], config.actor_of_run, config.rollout.temperature
    roles = {"actor": Role(*actor, reads_top=config.algorithm.score_centering > 0)}
    if "reference" in models:
        on_host = "reference" in config.placement.on_host
        settings = config.actor_of_run, config.rollout.temperature, False, on_host
        roles["reference"] = Role("reference", models["reference"], *settings)
    if "critic" in models:
        roles["critic"] = Role("critic", models["critic"], config.critic_of_run)
    shared = tuple(role for name, role in roles.items() if name not in config.placement.separate)
    yield "actor", config.platform, shared, config.seed
    for name in dict.fromkeys(config.placement.separate):
        yield name, config.platform, (roles[name],), config.seed
