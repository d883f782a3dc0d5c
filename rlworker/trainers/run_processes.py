"""The training processes of an RL run, the engines that each group of processes holds, and warnings about them."""

from collections.abc import Iterator, Mapping
from functools import partial

from engines.models.spec import ModelSpec
from hardware.attention.rollouts import list_rollout_warnings
from hardware.vllm_versions import list_version_warnings
from rlworker.cluster.workers import Role
from rlworker.config.model_checks import list_model_warnings
from rlworker.config.run import RunConfig


def list_groups(config: RunConfig, models: Mapping[str, ModelSpec]) -> Iterator[tuple[str, str, tuple[Role, ...], int]]:
    """List the groups of training processes, the actor's first: name, platform, engines and seed of each.

    Args:
        models: role -> description of its model.
    """
    actor = "actor", models["actor"], config.actor_of_run, config.rollout.temperature
    roles = {"actor": Role(*actor, needs_topk_logprobs=config.top_logprobs > 0)}
    frozen = partial(
        Role,
        config=config.actor_of_run.base_settings,
        temperature=config.rollout.temperature,
        trainable=False,
        cpu_offload="reference" in config.placement.cpu_offload,
        is_view=config.views_reference,
        needs_topk_logprobs=config.distill.top_k > 0,
    )
    roles |= {name: frozen(name, model) for name, model in models.items() if name not in ("actor", "critic")}
    if "critic" in models:
        roles["critic"] = Role("critic", models["critic"], config.critic_of_run, shares_base=config.shares_base)
    shared = tuple(role for name, role in roles.items() if name not in config.placement.dedicated_devices)
    yield "actor", config.platform, shared, config.seed
    for name in dict.fromkeys(config.placement.dedicated_devices):
        yield name, config.platform, (roles[name],), config.seed


def list_warnings(config: RunConfig, model: ModelSpec) -> list[str]:
    """List warnings about the rollouts of a run, by the model that samples."""
    warnings = list_rollout_warnings(config.rollout.attention_override)
    warnings += list_model_warnings(model, config.platform, config.rollout)
    warnings += list_version_warnings(config.ignore_versions)
    if config.rollout.staleness and config.importance == "none":
        warnings = [
            *warnings,
            "algorithm.importance=none with rollouts that run ahead: nothing corrects for tokens of older weights, "
            "which can undo what was learned; leave it out, or set --rollout.staleness 0",
        ]
    return [*warnings]
