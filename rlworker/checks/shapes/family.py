"""Name what a model type without a file in engines/models/families lacks, by transformers' own model of it.

Nothing is computed: transformers builds the type with tiny sizes on torch's ``meta`` device, and its tensors, rules,
positions and settings are held against what files of families state.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.models.families import list_families
from engines.models.hf_config import NEEDED, check_rope
from engines.models.layer import DecoderSizes, Piece
from rlworker.base.findings import Finding

if TYPE_CHECKING:  # a check's settings are read before transformers is imported
    from transformers import PreTrainedConfig, PreTrainedModel

_SIZES: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
"""Sizes of the tiny model: no two are alike, so that a shape tells what it is made of."""
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
"""Entries of ``layer_types`` for which rules are built."""
_LAYER = re.compile(r"^(?P<before>.*\blayers\.)(?P<number>\d+)\.(?P<name>.*)$")
_INTERLEAVED = "0::2"
"""A slice in a model's source by which its rotary embedding turns neighbours, in place of halves of a head."""
_NOT_SETTINGS = {"keys_to_ignore_at_inference", "base_model_tp_plan", "base_model_pp_plan", "head_dim"}
Shapes = dict[str, tuple[int, ...]]


def check_family(model_type: str) -> list[Finding]:
    """Check what a model type lacks that has no file of a family.

    Raises:
        ValueError: transformers has no language model of this type.
    """
    config, model = _build(model_type)
    text = config.get_text_config()
    layers, others = _sort_tensors(model, text)
    sizes = _read_sizes(text)
    findings = list(_check_tensors(layers, others, sizes))
    findings += [_check_rules(text), _check_positions(text, model), _check_settings(text), _check_tower(config)]
    file = Finding(
        "file",
        model_type,
        "FAILED",
        f"engines/models/families/.../{model_type}.py is not there; architecture {type(model).__name__}; "
        "docs/new_family.md says how to write it",
        "looked up",
    )
    return [file, *findings]


def _build(model_type: str) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Build transformers' model of a type, with tiny sizes and without numbers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(
            f"check: transformers has no model_type {model_type!r}; give the one of the model's config.json"
        ) from error
    text = config.get_text_config()
    for name, value in _SIZES.items():
        if hasattr(text, name):
            setattr(text, name, value)
    if getattr(text, "layer_types", None):
        text.layer_types = [*dict.fromkeys(text.layer_types), *text.layer_types][: text.num_hidden_layers]
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                return config, kind.from_config(config)
    raise ValueError(f"check: transformers has no language model of the type {model_type!r}; it has {type(config)}")


def _read_sizes(text: PreTrainedConfig) -> DecoderSizes:
    heads = text.num_attention_heads
    return DecoderSizes(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        ffn=getattr(text, "intermediate_size", 0) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
    )


def _sort_tensors(model: PreTrainedModel, text: PreTrainedConfig) -> tuple[list[Shapes], Shapes]:
    """Sort a model's tensors into those of each layer, by their names within it, and all others."""
    layers: list[Shapes] = [{} for _ in range(text.num_hidden_layers)]
    others: Shapes = {}
    for name, tensor in model.state_dict().items():
        place = _LAYER.match(name)
        if place and int(place["number"]) < len(layers) and not _is_of_tower(name):
            layers[int(place["number"])][place["name"]] = tuple(tensor.shape)
        else:
            others[name] = tuple(tensor.shape)
    return layers, others


def _is_of_tower(name: str) -> bool:
    return any(word in name for word in ("vision", "visual", "multi_modal", "image"))


def _list_pieces() -> list[tuple[str, Piece]]:
    """List the pieces that files of families state of layers, each once, with its name; shared ones first."""
    pieces: dict[Piece, str] = {}
    for module in list_families().values():
        layer = import_module(module).FAMILY.layer
        for piece in (*layer.mixer, *layer.mlp):
            if inspect.isfunction(piece):
                file = piece.__module__.rpartition(".")[2]
                pieces[piece] = f"{piece.__name__} of {file}.py"
    return sorted(((name, piece) for piece, name in pieces.items()), key=lambda pair: "_pieces" not in pair[0])


def _check_tensors(layers: list[Shapes], others: Shapes, sizes: DecoderSizes) -> Iterator[Finding]:
    """Find pieces for the tensors of each kind of layer, and name those that no piece takes."""
    if not any(layers):
        yield _judge("tensors", "layers", False, "no tensor is named layers.N: state every name of the layers")
        return
    pieces = _list_pieces()
    kinds: dict[tuple, list[int]] = {}
    for number, shapes in enumerate(layers):
        kinds.setdefault(tuple(sorted(shapes.items())), []).append(number)
    for items, numbers in kinds.items():
        shapes, where = dict(items), f"layers {', '.join(map(str, numbers))}"
        taken: dict[str, str] = {}
        used: list[str] = []
        fitting = [(name, _state(piece, sizes)) for name, piece in pieces]
        fitting = [(name, stated) for name, stated in fitting if stated and stated.items() <= shapes.items()]
        for name, stated in sorted(fitting, key=lambda pair: -len(pair[1])):
            if not taken.keys() & stated.keys():
                taken |= dict.fromkeys(stated, name)
                used.append(name)
        yield _judge("tensors", where, bool(used), f"taken by {', '.join(used) or 'nothing'}: {len(taken)} tensors")
        for name, shape in shapes.items():
            if name not in taken:
                yield _judge(
                    "tensors", where, False, f"no join takes {name} {list(shape)}{_compare(name, shape, sizes)}"
                )
    known = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
    for name, shape in others.items():
        if not name.endswith(known) and not _is_of_tower(name):
            yield _judge("tensors", "outside of layers", False, f"nothing takes {name} {list(shape)}")


def _state(piece: Piece, sizes: DecoderSizes) -> Shapes:
    """List the tensors that a piece states for these sizes; empty if it needs more than sizes."""
    try:
        weights = piece(sizes)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return {}
    return {name: shape for weight in weights for name, shape in weight.tensors.items()}


def _compare(name: str, shape: tuple[int, ...], sizes: DecoderSizes) -> str:
    """Say which pieces state a tensor of this name, and why they do not fit: other shapes, or tensors beside it."""
    for piece_name, piece in _list_pieces():
        stated = _state(piece, sizes)
        if name in stated:
            other = f"with the shape {list(stated[name])}" if stated[name] != shape else "beside tensors of other names"
            return f"; {piece_name} states it {other}"
    return ""


def _check_rules(text: PreTrainedConfig) -> Finding:
    """Check that the rule of every layer is built."""
    kinds = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(kinds - {*_LAYER_TYPES}):
        text_of = (
            f"layer_types has {', '.join(unknown)}, for which no rule is read; hardware/attention/rules.py has all"
        )
        return _judge("rules", "layer_types", False, text_of)
    window = getattr(text, "sliding_window", None)
    rules = ["state"] * ("linear_attention" in kinds) + ["window"] * bool(window or "sliding_attention" in kinds)
    return _judge("rules", "layers", True, f"causal{''.join(f', {rule}' for rule in rules)}: read_layers states which")


def _check_positions(text: PreTrainedConfig, model: PreTrainedModel) -> Finding:
    """Check that the rotary embedding is built: its kind, and which entries of a head it turns with which."""
    given = getattr(text, "rope_parameters", None)
    if not given:
        return _judge(
            "positions", "rope_parameters", False, "there are none: positions are not rotary, or fixed in code"
        )
    module = inspect.getmodule(type(model))
    turn = getattr(module, "rotate_half", None)
    if turn and _INTERLEAVED in inspect.getsource(turn):
        return _judge(
            "positions", "rotate_half", False, "turns neighbouring entries of a head; the engine turns halves"
        )
    ropes = given if all(isinstance(value, dict) for value in given.values()) else {"all layers": given}
    for where, rope in ropes.items():
        try:
            check_rope(dict(rope), {}, Path(text.model_type))
        except ValueError as error:
            share = " (read_partial_rope reads it)" if "partial_rotary_factor" in str(error) else ""
            return _judge("positions", where, bool(share), f"{str(error).partition(' has ')[2]}{share}")
    kinds = {rope.get("rope_type", "default") for rope in ropes.values()}
    return _judge("positions", "rotary", True, f"rope_type {', '.join(sorted(kinds))}; halves of a head turn")


def _check_settings(text: PreTrainedConfig) -> Finding:
    """Check that settings of a config are those that files of families know; others may change what is computed."""
    from transformers import AutoConfig, PreTrainedConfig

    missing = [key for key in NEEDED if not hasattr(text, key)]
    if missing:
        return _judge("settings", "config", False, f"lacks {', '.join(missing)}, which every family reads")
    known = set(PreTrainedConfig().to_dict()) | _NOT_SETTINGS
    for model_type in list_families():
        known |= AutoConfig.for_model(model_type).get_text_config().to_dict().keys()
    own = {key: value for key, value in text.to_dict().items() if key not in known}
    activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    if own:
        told = ", ".join(f"{key}={value!r}" for key, value in own.items())
        return _judge("settings", "config", False, f"no family knows {told}: build it, or name it in refused")
    return _judge("settings", "config", True, f"all are known; activation {activation}")


def _check_tower(config: PreTrainedConfig) -> Finding:
    has_tower = hasattr(config, "vision_config")
    said = "it sees images: state a Tower, as the files in families/images do" if has_tower else "text alone: no tower"
    return _judge("tower", "vision_config", not has_tower, said)


def _judge(check: str, where: str, passed: bool, text: str) -> Finding:
    return Finding(check, where, "ok" if passed else "FAILED", text, "looked up")
