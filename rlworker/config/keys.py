"""Settings by dotted key, and the keys that run folders and command lines may still have under another name."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

_RENAMED = {
    "actor.lr": "actor.optimizer.lr",
    "actor.min_lr": "actor.optimizer.min_lr",
    "actor.lr_decay": "actor.optimizer.lr_scheduler",
    "actor.lr_warmup_steps": "actor.optimizer.lr_warmup_steps",
    "actor.lr_decay_steps": "actor.optimizer.lr_decay_steps",
    "actor.weight_decay": "actor.optimizer.weight_decay",
    "actor.adam_beta1": "actor.optimizer.adam_beta1",
    "actor.adam_beta2": "actor.optimizer.adam_beta2",
    "actor.adam_eps": "actor.optimizer.adam_eps",
    "actor.clip_grad": "actor.optimizer.clip_grad",
    "actor.multiple": "actor.pad_to_multiple_of",
    "save_every": "checkpoint.save_every",
    "save_minutes": "checkpoint.save_minutes",
    "keep_checkpoints": "checkpoint.keep_newest",
    "keep_best": "checkpoint.keep_best",
    "separate": "placement.dedicated_devices",
    "logprob_diff_mean": "limits.logprob_diff_mean",
    "logprob_diff_max": "limits.logprob_diff_max",
    "ignore_logprob_diff": "limits.ignore_logprob_diff",
}
"""Key in an older run folder or command line -> the key that has its value here."""


def flatten_config(config: Any) -> dict[str, Any]:
    """Spell a config as dotted key -> value: ``{"steps": 100, "actor.tp": 1, "actor.optimizer.lr": 1e-6, ...}``."""
    return flatten(asdict(config))


def flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Spell nested settings as dotted key -> value; a pass-through dict counts as one value."""
    flat = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and key not in ("megatron", "vllm")
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def map_renamed_keys(known: Collection[str]) -> dict[str, str]:
    """Map each key of an older run folder or command line to the one of the ``known`` keys that it means.

    A key of the settings themselves, like a recipe's own, keeps its name.
    """
    return {key: here for key, here in _RENAMED.items() if here in known and key not in known}
