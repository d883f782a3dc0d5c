"""Refuse in a plan what the start of the run would refuse, by the settings and each model's config.json alone."""

from functools import partial

from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from rlworker.config.memory import Served
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig
from rlworker.data.rows import read_ends
from rlworker.rollouts.scoring import check_served

Config = RunConfig | SftConfig


def check_start(config: Config) -> tuple[dict[str, ModelSpec], Served]:
    """Check a run as its start does, without weights, tokenizers and rows.

    Returns:
        role -> model, and name of a served model -> its shape.

    Raises:
        ValueError: the start would refuse the run, or a node of the platform has too few devices.
    """
    check_nodes(config)
    find = partial(find_model, files=["config.json"])
    models = config.check_models(find, is_whole=False)
    read_ends(models["actor"].folder, models["actor"].vocab)
    served = check_served(config, find, is_whole=False) if isinstance(config, RunConfig) else {}
    return models, {name: each.spec for name, each in served.items()}


def check_nodes(config: Config) -> None:
    """Raise ValueError where workers that must share a node are more than a node of the platform has devices for."""
    node = get_platform(config.platform).node
    if node is None:
        return
    sizes = {"actor": config.actor.tp}
    if isinstance(config, RunConfig):
        sizes["rollout"] = config.rollout.tp
        sizes |= {f"models.{name}": own.tp for name, own in config.models.items()}
    for section, tp in sizes.items():
        if tp > node.devices:
            raise ValueError(
                f"plan: {section}.tp={tp} needs {tp} devices of one node, and a node of platform {config.platform!r} "
                f"has {node.devices}; lower --{section}.tp"
            )
