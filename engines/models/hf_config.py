"""Reading a text model's ``config.json``: keys, types and values that the engines can build.

Differences between families are in ``families/``.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from engines.models.family import Family
from engines.models.layer import LayerKind
from engines.models.weight import Head
from engines.validation import fits, spell
from hardware.attention.rules import CAUSAL, Rule

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
NEEDED = (*_SIZES, "rms_norm_eps")
"""Keys that the config of every family must have."""

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Keys that limit the length; vLLM looks at each (0.32, model_arch_config_convertor), and the smallest holds."""

_DTYPE = Literal["float32", "bfloat16", "float16", "float64"] | None

_TYPES: dict[str, Any] = {
    **dict.fromkeys(LENGTHS, int | None),
    **dict.fromkeys(_SIZES, int),
    "rms_norm_eps": float,
    "num_key_value_heads": int | None,
    "head_dim": int | None,
    "tie_word_embeddings": bool,
    "rope_theta": float | None,
    "rope_parameters": dict[str, Any] | None,
    "rope_scaling": dict[str, Any] | None,
    "use_sliding_window": bool,
    "sliding_window": int | None,
    "query_pre_attn_scalar": float,
    "max_window_layers": int,
    "architectures": list[str] | None,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "bos_token_id": int | None,
    "pad_token_id": int | None,
    "eos_token_id": int | list[int] | None,
    "initializer_range": float,
    "use_cache": bool,
}
"""Key of a config -> allowed type; transformers refuses most other values too, but only after vLLM has started."""

_ROPE_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kind of rotary embedding -> the keys that it needs."""


def check_keys(config: dict, path: Path, family: Family) -> None:
    """Raise ValueError for keys that are missing, of a wrong type or out of range."""
    if missing := [key for key in family.needed if key not in config]:
        raise ValueError(f"model: {path} lacks the keys {missing}; save the model again with transformers")
    kinds = list[Literal[family.layer_types]] | None  # pyright: ignore[reportInvalidTypeForm]  of a family
    for key, kind in (_TYPES | {"layer_types": kinds}).items():
        if key in config and not fits(kind, config[key]):
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected {spell(kind)}")
    for key in (*_SIZES, *LENGTHS, "num_key_value_heads", "head_dim", "sliding_window"):
        is_used = key != "sliding_window" or config.get("use_sliding_window", True)  # Qwen2-MoE saves 0 without one
        if is_used and config.get(key) is not None and config[key] < 1:
            raise ValueError(f"model: {path} has {key} {config[key]}, expected at least 1")
    if not 0 < config["rms_norm_eps"] < 1:
        raise ValueError(f"model: {path} has rms_norm_eps {config['rms_norm_eps']}, expected between 0 and 1")


def read_head_dim(config: dict, path: Path, family: Family) -> int:
    """Read the size of a head; ValueError where not every reader of the config would find the same one."""
    hidden, heads, given = config["hidden_size"], config["num_attention_heads"], config.get("head_dim")
    if "head_dim" in family.needed:
        if given is None:
            raise ValueError(f"model: {path} has head_dim null, expected a whole number")
    elif hidden % heads:
        raise ValueError(f"model: {path} has num_attention_heads {heads}, which do not divide its hidden_size {hidden}")
    size = hidden // heads if given is None else given
    if not family.own_head_dim and size != hidden // heads:
        raise ValueError(
            f"model: {path} has head_dim {given}, expected hidden_size / num_attention_heads = {hidden // heads}: "
            f"vLLM knows no other for {family.model_type}"
        )
    if size % 2:
        raise ValueError(f"model: {path} has head_dim {size}, expected an even number: rotary embeddings turn pairs")
    return size


def read_rope(config: dict, path: Path) -> dict:
    """Read the rotary settings in the form of ``rope_parameters``; older configs have ``rope_scaling`` with ``type``.

    Raises:
        ValueError: a kind that is not built, or a key of it that is missing or no number.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return check_rope(rope, config, path)


def check_rope(rope: dict, config: dict, path: Path) -> dict:
    """Return rotary settings in the form of today's configs; ValueError as ``read_rope``."""
    rope = dict(rope)
    kinds = {rope[key] for key in ("type", "rope_type") if isinstance(rope.get(key), str)}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPE_NEEDED or len(kinds) > 1:
        quoted = " and ".join(repr(k) for k in sorted(kinds)) if len(kinds) > 1 else repr(kind)
        raise ValueError(f"model: {path} has rope_type {quoted}, expected one of {', '.join(_ROPE_NEEDED)}")
    if missing := [key for key in _ROPE_NEEDED[kind] if key not in rope]:
        raise ValueError(f"model: {path} has rope_type {kind!r} without {missing}; save the model again")
    for key in ("rope_theta", *_ROPE_NEEDED[kind]):
        if not fits(float, rope[key]) or not 0 < rope[key] <= sys.float_info.max:
            raise ValueError(f"model: {path} has {key} {rope[key]!r}, expected a number above 0")
    for key, value in rope.items():
        if isinstance(value, dict | list):
            raise ValueError(f"model: {path} has rotary settings of their own for {key!r}, which the engine lacks")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(
            f"model: {path} has partial_rotary_factor {partial!r}, expected 1: the engine turns whole heads"
        )
    return rope


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: one rotary embedding for all, and a window on those that slide.

    Configs without ``layer_types`` slide on the layers from ``max_window_layers`` up.

    Raises:
        ValueError: ``layer_types`` does not fit the number of layers, or the window; or as ``read_rope``.
    """
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"model: {path} has {len(kinds)} layer_types, expected one for each of its {layers} layers")
    if kinds and "sliding_attention" in kinds and not window:
        raise ValueError(
            f"model: {path} has layer_types with 'sliding_attention', but no window: set use_sliding_window and "
            "sliding_window, or 'full_attention'"
        )
    first = config.get("max_window_layers", 28) if window else layers  # transformers' default
    kinds = kinds or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    full = replace(layer, rule=CAUSAL, rope=read_rope(config, path))
    sliding = replace(full, rule=Rule(window=window))
    return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)


def refuse_unsupported(config: dict, path: Path, family: Family, head: Head) -> None:
    """Raise ValueError for features that a config may ask for and an engine would drop in silence."""
    for key in family.refused:
        if config.get(key):
            raise ValueError(f"model: {path} sets {key}, which the engine does not build; turn it off or leave it out")
    for key, built in (family.activation, ("is_causal", True), ("logit_scale", 1)):
        if config.get(key, built) != built:
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected {built!r}")
    if config.get("attention_dropout"):
        raise ValueError(f"model: {path} has attention_dropout {config['attention_dropout']}; set it to 0")
    known = list(dict.fromkeys([family.architecture, family.find_architecture(head)]))
    if config.get("architectures") not in (None, [], *([name] for name in known)):
        expected = " or ".join(f"[{name!r}]" for name in known)
        raise ValueError(f"model: {path} has architectures {config['architectures']}, expected {expected}")
