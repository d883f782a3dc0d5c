"""Check the settings that change when a run is resumed."""

import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from rlworker.config.command_line import flatten, flatten_config
from rlworker.config.run import TrainingConfig

Changes = dict[str, tuple[Any, Any]]
"""Dotted key -> value that the run has stored, and value with which it is to be resumed."""

_OF_EACH_START = {"resume", "run_dir", "evaluate"}
_MAY_CHANGE = {"steps", "eval_every", "samples_every", "trackers", "profile_steps", "capsule_steps"}
_MAY_CHANGE |= {"prompts_per_step", "samples_per_prompt", "rows_per_step"}
_MAY_CHANGE |= {"curriculum.pass_rates", "curriculum.advance_at", "distill.top_k"}
_MAY_CHANGE_IN = ("actor.", "rollout.", "algorithm.", "critic.", "environment.")
_MAY_CHANGE_IN += ("checkpoint.", "placement.", "limits.", "recovery.", "validation.", "models.")
"""Settings, and sections of them, that a run may change on its way."""
_BELONG_TO_RUN = {"actor.dtype", "actor.freeze", "actor.attention_override", "actor.megatron"}
_BELONG_TO_RUN |= {"rollout.attention_override", "algorithm.reference", "algorithm.name", "algorithm.advantage"}
_BELONG_TO_RUN |= {"actor.lora.rank", "actor.lora.alpha", "actor.lora.targets", "actor.lora.scaling"}
_BELONG_TO_RUN |= {"actor.lora.start"}
_BELONG_TO_RUN |= {"critic.train", "critic.model", "critic.warmup_steps"}
"""Settings of these sections that decide the models of a run, their computation, and whether they learn."""
_SERVED = re.compile(r"models\.\w+\.(model|kind|label|template)")
"""Settings of a served model that decide its verdicts."""


def read_changes(folder: Path, config: TrainingConfig, movable: Set[str] = frozenset()) -> Changes:
    """Read the settings that a run folder has stored, and return those that differ from ``config``, to resume the run.

    Args:
        movable: settings whose path may change, since digests compare the content of their files.

    Raises:
        ValueError: as for ``read_differences``, or a changed setting belongs to the run and must not change.
    """
    changes = read_differences(folder, config)
    moved = set()
    for key in changes.keys() & movable:
        before, now = changes[key]
        if before and now and (isinstance(before, str) or before.keys() == now.keys()):  # a path, or paths by name
            moved.add(key)
    _check_changes({key: change for key, change in changes.items() if key not in moved}, config, str(folder))
    return changes


def read_differences(folder: Path, config: TrainingConfig) -> Changes:
    """Read the settings that a run folder has stored, and return those that differ from ``config``.

    A setting that did not exist when the run was started counts as having its present default.

    Raises:
        ValueError: the stored settings cannot be read.
    """
    try:
        stored = json.loads((folder / "config.json").read_text())
        if not isinstance(stored, dict):
            raise ValueError(f"expected an object, got a {type(stored).__name__}")
    except ValueError as error:
        raise ValueError(
            f"run_dir: the config.json in {str(folder)!r} cannot be read: {error}; choose another --run-dir, or put "
            "back the one that the run wrote"
        ) from None
    default, now = flatten_config(type(config)()), flatten_config(config)
    before, now = (json.loads(json.dumps(settings)) for settings in (default | flatten(stored), now))
    keys = sorted((before.keys() | now.keys()) - _OF_EACH_START)
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _check_changes(changes: Changes, config: TrainingConfig, folder: str) -> None:
    """Raise ValueError where a run would be another one with the changes, naming their keys.

    A setting that its section has no more, since the run was started by an older version, is told and not refused.

    Args:
        folder: the run's.
    """
    where = f"run_dir: {folder!r} cannot be resumed with"
    inside = {key for key in changes if key.startswith(_MAY_CHANGE_IN) and key not in _BELONG_TO_RUN}
    inside = {key for key in inside if not _SERVED.fullmatch(key)}
    known = flatten_config(config).keys()
    sections = {key.rpartition(".")[0] for key in known} - {""}
    gone = {key for key in changes if key not in known and key.rpartition(".")[0] in sections}
    if refused := {key: change for key, change in changes.items() if key not in {*_MAY_CHANGE, *inside, *gone}}:
        was = ", ".join(f"{key} was {before!r}, is {now!r}" for key, (before, now) in refused.items())
        raise ValueError(
            f"{where} other settings of its model, its data or the order of its data: {was}. Set them back, or start a "
            f"new run from its weights: --run-dir ANOTHER --model {folder}/checkpoints/step_N/hf"
        )
    optimizer = config.actor.optimizer
    cut = next((key for key in ("algorithm.mini_batches", "algorithm.epochs") if key in changes), None)
    if cut and optimizer.lr_scheduler != "constant" and not optimizer.lr_decay_steps:
        raise ValueError(
            f"{where} {cut}={changes[cut][1]}, which changes the number of optimizer steps of a step: the "
            f"{optimizer.lr_scheduler} decay over the whole run would end elsewhere; set "
            "--actor.optimizer.lr-decay-steps to the optimizer step at which the decay ends"
        )
