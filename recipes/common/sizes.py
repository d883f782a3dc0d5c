"""A recipe is spread over the machines of a platform: how many ranks train, which part of the model each holds, and how
many engines sample."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from engines.config import MegatronConfig
from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from hardware.platform import Node
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig

Recipe = TypeVar("Recipe", RunConfig, SftConfig)

_STATED_GB = 80
"""Memory of the devices for which recipes state the KV cache of a rollout device, in GiB."""


def fit_to_model(recipe: Recipe) -> Recipe:
    """Lower the actor's tensor-parallel size to the largest that the model allows; an invalid model is left to later
    checks."""
    with suppress(ValueError):
        folder = find_model(recipe.model, files=("config.json",))
        model, actor = ModelSpec.from_folder(folder), recipe.actor
        for tp in range(actor.tp, 0, -1):
            if (unit := _count_unit(actor, tp)) > actor.ranks:
                continue
            fitted = replace(actor, tp=tp, ranks=actor.ranks // unit * unit)
            with suppress(ValueError):
                fitted.check_model(model)
                return replace(recipe, actor=fitted)
    return recipe


def fit_to_node(recipe: Recipe, node: Node | None) -> Recipe:
    """Size the recipe for one machine, or for the smallest number of machines that hold the model once.

    Half of the devices train, rounded down to whole replicas, and the rest sample. All devices train without a rollout,
    and where trainers and rollout engines take turns. The KV cache of a rollout device has half of the memory that the
    device has beyond 80 GB, or half of what it lacks less.

    Args:
        node: None leaves the recipe as it is.
    """
    if node is None:
        return recipe
    actor, unit = recipe.actor, _count_unit(recipe.actor, recipe.actor.tp)
    takes_turns = isinstance(recipe, RunConfig) and recipe.placement.colocate
    shares = 2 if isinstance(recipe, RunConfig) and not takes_turns else 1
    devices = math.ceil(shares * unit / node.devices) * node.devices
    actor = replace(actor, ranks=devices // shares // unit * unit)
    if not isinstance(recipe, RunConfig):
        return replace(recipe, actor=actor)
    left = actor.ranks if takes_turns else devices - actor.ranks
    cache_mb = max(0, recipe.rollout.kv_cache_mb + (node.device_gb - _STATED_GB) * 1024 // 2)
    rollout = replace(recipe.rollout, engines=left // recipe.rollout.tp, kv_cache_mb=cache_mb)
    return replace(recipe, actor=actor, rollout=rollout)


def _count_unit(actor: MegatronConfig, tp: int) -> int:
    """Count the least number of ranks that hold a model once, with its experts shared out."""
    return math.lcm(tp * actor.pp * actor.cp, actor.pp * actor.ep * actor.etp)
