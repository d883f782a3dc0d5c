"""Settings that a run may go on with, where they differ from those that its folder has."""

import json
from typing import Any

from rlworker.config.keys import flatten, flatten_config, map_renamed_keys
from rlworker.config.run import TrainingConfig

Changes = dict[str, tuple[Any, Any]]
"""Key -> the value that the run had, and the one that it goes on with."""

_OF_EACH_START = {"resume", "run_dir"}
_MAY_CHANGE = {"steps", "eval_every", "samples_every", "trackers", "profile_steps"}
_MAY_CHANGE |= {"prompts_per_step", "samples_per_prompt", "rows_per_step"}
_MAY_CHANGE_IN = ("actor.", "rollout.", "algorithm.", "critic.", "reward.", "episodes.")
_MAY_CHANGE_IN += ("checkpoint.", "placement.", "limits.", "recovery.")
"""Settings, and sections of them, that a run may change on its way."""
_BELONG_TO_RUN = {"actor.dtype", "actor.freeze", "actor.attention_override", "actor.megatron"}
_BELONG_TO_RUN |= {"rollout.attention_override", "algorithm.reference"}
_BELONG_TO_RUN |= {"critic.train", "critic.model", "critic.warmup_steps"}
"""Of those sections what decides which models a run has, what they compute, and which of them learn."""


def list_changes(stored: dict, config: TrainingConfig) -> Changes:
    """List the settings in which a run's stored settings differ from those that it is to go on with.

    A setting that did not exist yet when the run was started had its present default.
    """
    default, now = flatten_config(type(config)()), flatten_config(config)
    names = map_renamed_keys(now)
    before = default | {names.get(key, key): value for key, value in flatten(stored).items()}
    before, now = (json.loads(json.dumps(settings)) for settings in (before, now))
    keys = sorted((before.keys() | now.keys()) - _OF_EACH_START)
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def check_changes(changes: Changes, config: TrainingConfig, folder: str) -> None:
    """Raise ValueError where a run would be another one with the changes, naming their keys.

    Args:
        folder: the run's.
    """
    where = f"run_dir: {folder!r} cannot be resumed with"
    inside = {key for key in changes if key.startswith(_MAY_CHANGE_IN) and key not in _BELONG_TO_RUN}
    if refused := {key: change for key, change in changes.items() if key not in {*_MAY_CHANGE, *inside}}:
        was = ", ".join(f"{key} was {before!r}, is {now!r}" for key, (before, now) in refused.items())
        raise ValueError(
            f"{where} other settings of its model, its data or its order: {was}. Set them as they were, or begin "
            f"another run in another --run-dir, from this one's weights with --model {folder}/checkpoints/step_N/hf"
        )
    optimizer = config.actor.optimizer
    if "algorithm.mini_batches" in changes and optimizer.lr_scheduler != "constant" and not optimizer.lr_decay_steps:
        raise ValueError(
            f"{where} algorithm.mini_batches={changes['algorithm.mini_batches'][1]}: the {optimizer.lr_scheduler} "
            "decay over the whole run counts optimizer steps, of which the steps so far had another number; set "
            "--actor.optimizer.lr-decay-steps to the optimizer step that ends it"
        )
