"""A recipe is spread over the machines of a platform: how many ranks train, which part of the model each holds, and how
many engines sample."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from hardware.platform import Node
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig

Recipe = TypeVar("Recipe", RunConfig, SftConfig)

_WEIGHTS_GB = 16
"""GB that a rollout engine takes for the largest models that the recipes are for: 8 billion bfloat16 parameters."""


def fit_to_model(recipe: Recipe) -> Recipe:
    """Lower the actor's tensor-parallel size to the largest that the model allows; an invalid model is left to later
    checks."""
    with suppress(ValueError):
        folder = find_model(recipe.model, files=("config.json",))
        model, actor = ModelSpec.from_folder(folder), recipe.actor
        for tp in range(actor.tp, 0, -1):
            replica_ranks = tp * actor.pp * actor.cp
            fitted = replace(actor, tp=tp, ranks=max(1, actor.ranks // replica_ranks) * replica_ranks)
            with suppress(ValueError):
                fitted.check_model(model)
                return replace(recipe, actor=fitted)
    return recipe


def fit_to_node(recipe: Recipe, node: Node | None) -> Recipe:
    """Size the recipe for one machine, or for the smallest number of machines that hold the model once.

    Half of the devices train, rounded down to whole replicas, and the rest sample. Without a rollout all devices train.
    The KV cache gets half of a rollout device's memory beside the weights.

    Args:
        node: None leaves the recipe as it is.
    """
    if node is None:
        return recipe
    actor = recipe.actor
    replica_ranks, shares = actor.tp * actor.pp * actor.cp, 2 if isinstance(recipe, RunConfig) else 1
    devices = math.ceil(shares * replica_ranks / node.devices) * node.devices
    actor = replace(actor, ranks=devices // shares // replica_ranks * replica_ranks)
    if not isinstance(recipe, RunConfig):
        return replace(recipe, actor=actor)
    cache_mb = max(0, node.device_gb - _WEIGHTS_GB) * 1024 // 2
    rollout = replace(recipe.rollout, engines=devices - actor.ranks, kv_cache_mb=cache_mb)
    return replace(recipe, actor=actor, rollout=rollout)
