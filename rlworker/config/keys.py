"""Settings by dotted key."""

from dataclasses import asdict
from typing import Any


def flatten_config(config: Any) -> dict[str, Any]:
    """Spell a config as dotted key -> value: ``{"steps": 100, "actor.tp": 1, "actor.optimizer.lr": 1e-6, ...}``."""
    return flatten(asdict(config))


def flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Spell nested settings as dotted key -> value; a pass-through dict counts as one value."""
    flat = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and key not in ("megatron", "vllm", "chat_template_args")
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat
