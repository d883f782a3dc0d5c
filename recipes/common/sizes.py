"""How a recipe is spread over the machines of a platform."""

import math
from dataclasses import replace
from typing import TypeVar

from hardware.platform import Node
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig

Recipe = TypeVar("Recipe", RunConfig, SftConfig)

_WEIGHTS_GB = 16
"""What a rollout engine takes for the largest models that the recipes are for: 8 billion parameters in bfloat16."""


def fit_to_node(recipe: Recipe, node: Node | None) -> Recipe:
    """The recipe at the sizes of one machine, or of as few as hold the model once.

    Half of the devices train, rounded down to whole replicas, and the others sample. Without a rollout all of them
    train. Keys and values get half of what the weights leave of a rollout engine's device.

    Args:
        node: None leaves the recipe as it is.
    """
    if node is None:
        return recipe
    actor, samples = recipe.actor, isinstance(recipe, RunConfig)
    replica, shares = actor.tp * actor.pp * actor.cp, 2 if samples else 1
    devices = math.ceil(shares * replica / node.devices) * node.devices
    actor = replace(actor, ranks=devices // shares // replica * replica)
    if not samples:
        return replace(recipe, actor=actor)
    cache_mb = max(0, node.device_gb - _WEIGHTS_GB) * 1024 // 2
    rollout = replace(recipe.rollout, engines=devices - actor.ranks, kv_cache_mb=cache_mb)
    return replace(recipe, actor=actor, rollout=rollout)
