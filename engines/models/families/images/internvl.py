"""InternVL in its HuggingFace form: Qwen2 or Qwen3 with an InternViT, for which an image is cut into tiles
(arXiv:2504.10479)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.models.families._pieces import linear
from engines.models.families.text.qwen2 import FAMILY as QWEN2
from engines.models.families.text.qwen3 import FAMILY as QWEN3
from engines.models.family import Family
from engines.models.vision.vision_spec import Tower, VisionSpec
from engines.validation import fits, read_object

_LANGUAGES = {family.model_type: family for family in (QWEN2, QWEN3)}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Defaults of transformers 5.19 for keys that a ``text_config`` leaves out (Qwen2Config, Qwen3Config)."""
_LANGUAGE_DEFAULTS = {"qwen2": _DEFAULTS, "qwen3": _DEFAULTS | {"head_dim": 128}}
_WHOLE_DEFAULTS = {"image_token_id": 151667, "image_seq_length": 256, "downsample_ratio": 0.5}
"""InternVLConfig's."""
_WHOLE_BUILT = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
}
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "attention_bias": False,
}
"""InternVLVisionConfig's."""
_VISION_BUILT: dict[str, Any] = {
    "norm_type": "layer_norm",
    "use_qk_norm": False,
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
    "hidden_dropout_prob": 0,
    "attention_dropout": 0,
    "projection_dropout": 0,
    "hidden_act": "gelu",
}
"""The only supported values, transformers' defaults: a larger InternViT (6B) has other values."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
"""Keys of the tokenizer's settings that name tokens -> the tokens of the released models."""


def list_tower_weights(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """List the shape of each weight of tower and projector, in the order of the modules."""
    width, ffn, merged = vision.width, vision.ffn, vision.width * vision.merge**2
    block: dict[str, tuple[int, ...]] = {"lambda_1": (width,), "lambda_2": (width,)}
    for name in ("q_proj", "k_proj", "v_proj"):
        block |= linear(f"attention.{name}", width, width)
        if not vision.config["attention_bias"]:
            del block[f"attention.{name}.bias"]
    block |= linear("attention.projection_layer", width, width)
    block |= linear("mlp.fc1", ffn, width) | linear("mlp.fc2", width, ffn)
    for name in ("layernorm_before", "layernorm_after"):
        block |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    shapes = {
        "embeddings.cls_token": (1, 1, width),
        "embeddings.position_embeddings": (1, vision.positions, width),
        "embeddings.patch_embeddings.projection.weight": (width, vision.channels, vision.patch, vision.patch),
        "embeddings.patch_embeddings.projection.bias": (width,),
    }
    for layer in range(vision.depth):
        shapes |= {f"encoder.layer.{layer}.{name}": shape for name, shape in block.items()}
    shapes = {f"encoder.{name}": shape for name, shape in shapes.items()}
    projector = {"layer_norm.weight": (merged,), "layer_norm.bias": (merged,)}
    projector |= linear("linear_1", vision.out, merged) | linear("linear_2", vision.out, vision.out)
    return shapes | {f"projector.{name}": shape for name, shape in projector.items()}


def read_vision(config: dict, tower: Tower, path: Path) -> VisionSpec:
    """Read the vision tower from a ``config.json``, and the image tokens from the tokenizer beside it.

    Raises:
        ValueError: a key asks for a feature that is not built, or the tokenizer lacks a token.
    """
    config, text = _WHOLE_DEFAULTS | _WHOLE_BUILT | config, extract_text(config)
    vision: dict[str, Any] = _VISION_DEFAULTS | _VISION_BUILT | (config.get("vision_config") or {})
    sizes = {f"vision_config.{key}": vision[key] for key in _SIZES}
    sizes |= {"text_config.hidden_size": text.get("hidden_size", _DEFAULTS["hidden_size"])}
    for key, value in sizes.items():
        if not fits(int, value) or value < 1:
            raise ValueError(f"model: {path} has {key} {value!r}, expected a whole number of at least 1")
    built = {f"vision_config.{key}": value for key, value in _VISION_BUILT.items()}
    for key, expected in (built | _WHOLE_BUILT).items():
        *part, name = key.split(".")
        if (value := (vision if part else config)[name]) != expected:
            raise ValueError(f"model: {path} has {key} {value!r}, expected {expected!r}: another is not built")
    if not fits(bool, bias := vision["attention_bias"]):
        raise ValueError(f"model: {path} has vision_config.attention_bias {bias!r}, expected true or false")
    patch = _read_side(vision, "patch_size", path)
    side = _read_side(vision, "image_size", path) // patch
    merge = _read_merge(config, side, path)
    marks = read_tokens(path.parent)
    if not fits(int, image_token := config["image_token_id"]) or image_token < 0:
        raise ValueError(f"model: {path} has image_token_id {image_token!r}, expected the number of a token")
    return VisionSpec(
        tower=tower,
        config=vision,
        depth=vision["num_hidden_layers"],
        width=vision["hidden_size"],
        ffn=vision["intermediate_size"],
        out=sizes["text_config.hidden_size"],
        patch=patch,
        temporal_patch=1,
        channels=vision["num_channels"],
        merge=merge,
        positions=side**2 + 1,  # and the class token's
        deepstack=0,
        image_token=image_token,
        video_token=marks["video_token"],
        start_token=marks["start_image_token"],
        end_token=marks["end_image_token"],
        pad_token=None,
        axes=(),
        side=side,
        norm_eps=1e-5,
    )


def _read_side(vision: dict, key: str, path: Path) -> int:
    """Read the side of a square; a config has one length or two."""
    value = vision[key]
    sides = value if isinstance(value, list) else [value]
    if not fits(list[int], sides) or len(sides) not in (1, 2) or len(set(sides)) != 1 or sides[0] < 1:
        raise ValueError(f"model: {path} has vision_config.{key} {value!r}, expected the side of a square, at least 1")
    return sides[0]


def _read_merge(config: dict, side: int, path: Path) -> int:
    """Read how many patches of a side become one token, of a tile of ``side`` x ``side`` patches."""
    ratio = config["downsample_ratio"]
    merge = round(1 / ratio) if fits(float, ratio) and ratio > 0 else 0
    if merge * ratio != 1 or side % merge:
        raise ValueError(
            f"model: {path} has downsample_ratio {ratio!r}, expected 1 / n with n a divisor of {side}, the patches of "
            "a tile's side"
        )
    if config["image_seq_length"] != (tokens := (side // merge) ** 2):
        raise ValueError(
            f"model: {path} has image_seq_length {config['image_seq_length']!r}, expected {tokens}, the tokens of a "
            "tile by the other keys"
        )
    return merge


def read_tokens(folder: Path) -> dict[str, int]:
    """Read the numbers of the tokens that mark images and stand for videos; config.json has them not.

    Raises:
        ValueError: the tokenizer's files are not there, or it lacks a token.
    """
    files = folder / "tokenizer_config.json", folder / "tokenizer.json"
    for file in files:
        if not file.is_file():
            raise ValueError(f"model: {str(folder)!r} has no {file.name}, which says what marks images; save it there")
    settings, tokenizer = map(read_object, files)
    named = settings.get("extra_special_tokens")
    named = (named if isinstance(named, dict) else {}) | settings
    numbers = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    tokens = {key: named.get(key, default) for key, default in _TOKENS.items()}
    if lacking := sorted(token for token in tokens.values() if token not in numbers):
        raise ValueError(
            f"model: the tokenizer in {str(folder)!r} lacks {lacking}, which mark images and videos; take the one that "
            "belongs to the model"
        )
    return {key: numbers[token] for key, token in tokens.items()}


def extract_text(config: dict) -> dict:
    """Extract the settings of the language model alone."""
    shared = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    own = {"model_type": "internvl", "architectures": config.get("architectures")}
    return {"tie_word_embeddings": True} | (config.get("text_config") or {}) | shared | own


def select_language(config: dict, path: Path) -> Family:
    """Select the family of a config's language model; ValueError where it is neither Qwen2 nor Qwen3."""
    kind = (config.get("text_config") or {}).get("model_type", "qwen2")
    if kind not in _LANGUAGES:
        raise ValueError(
            f"model: {path} has text_config.model_type {kind!r}, expected one of {sorted(_LANGUAGES)}: InternVL on "
            "another language model is not built"
        )
    return _add_sight(_LANGUAGES[kind])


def _add_sight(language: Family) -> Family:
    """Make of a language model's family one with InternVL's tower and names."""
    return replace(
        language,
        model_type="internvl",
        architecture="InternVLForConditionalGeneration",
        select=select_language,
        defaults=_LANGUAGE_DEFAULTS[language.model_type],
        extract_language=extract_text,
        prefix="language_model.model.",
        output="language_model.lm_head.weight",
        renamed={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
        tower=Tower(
            prefixes={"encoder.": "vision_tower.", "projector.": "multi_modal_projector."},
            projector=("projector.",),
            runner="engines.megatron.vision.towers:InternTower",
            module="transformers.models.internvl.modeling_internvl:InternVLVisionModel",
            config="transformers.models.internvl.configuration_internvl:InternVLVisionConfig",
            needed=(),
            activation=_VISION_BUILT["hidden_act"],
            gated=False,
            weights=list_tower_weights,
            read=read_vision,
            tiles=True,
        ),
    )


FAMILY = _add_sight(QWEN2)
