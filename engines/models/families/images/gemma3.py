"""Gemma 3 with images: a SigLIP tower, images of one size, bidirectional attention within an image
(arXiv:2503.19786)."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.models.families._pieces import linear
from engines.models.families.text.gemma3_text import FAMILY as TEXT
from engines.models.families.text.gemma3_text import read_layers as read_text_layers
from engines.models.layer import LayerKind
from engines.models.vision.vision_spec import Tower, VisionSpec
from engines.validation import fits

_TOKENS = {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000}
_DEFAULTS: dict[str, Any] = {"mm_tokens_per_image": 256} | _TOKENS
"""Defaults of transformers 5.19 for keys that a config leaves out (Gemma3Config)."""
_VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}
"""SiglipVisionConfig's."""
_VISION_SIZES = tuple(key for key, value in _VISION_DEFAULTS.items() if type(value) is int)


def list_tower_weights(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """List the shape of each weight of tower and projector, in the order of the modules."""
    width, ffn = vision.width, vision.ffn
    block = linear("self_attn.k_proj", width, width) | linear("self_attn.v_proj", width, width)
    block |= linear("self_attn.q_proj", width, width) | linear("self_attn.out_proj", width, width)
    norms = {name: {f"{name}.weight": (width,), f"{name}.bias": (width,)} for name in ("layer_norm1", "layer_norm2")}
    block = norms["layer_norm1"] | block | norms["layer_norm2"]
    block |= linear("mlp.fc1", ffn, width) | linear("mlp.fc2", width, ffn)
    patch = "embeddings.patch_embedding"
    shapes = {f"{patch}.weight": (width, vision.channels, vision.patch, vision.patch), f"{patch}.bias": (width,)}
    shapes["embeddings.position_embedding.weight"] = (vision.positions, width)
    for layer in range(vision.depth):
        shapes |= {f"encoder.layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"post_layernorm.weight": (width,), "post_layernorm.bias": (width,)}
    shapes = {f"encoder.{name}": shape for name, shape in shapes.items()}
    projector = {"mm_input_projection_weight": (width, vision.out), "mm_soft_emb_norm.weight": (width,)}
    return shapes | {f"projector.{name}": shape for name, shape in projector.items()}


def read_vision(config: dict, tower: Tower, path: Path) -> VisionSpec:
    """Read the vision tower from a ``config.json``; ValueError for features that are not built."""
    config, text = _DEFAULTS | config, extract_text(config)
    vision = _VISION_DEFAULTS | (config.get("vision_config") or {})
    window = text.get("sliding_window", TEXT.defaults["sliding_window"])
    numbers = {key: config[key] for key in _DEFAULTS} | {f"vision_config.{key}": vision[key] for key in _VISION_SIZES}
    numbers |= {"text_config.hidden_size": text.get("hidden_size"), "text_config.sliding_window": window}
    for key, value in numbers.items():
        least = 0 if key in _TOKENS or key.endswith(".num_hidden_layers") else 1
        if not fits(int, value) or value < least:
            raise ValueError(f"model: {path} has {key} {value!r}, expected a whole number of at least {least}")
    tokens, side = config["mm_tokens_per_image"], vision["image_size"] // vision["patch_size"]
    merge = side // max(1, math.isqrt(tokens))
    if math.isqrt(tokens) ** 2 != tokens or side != merge * math.isqrt(tokens):
        raise ValueError(
            f"model: {path} has mm_tokens_per_image {tokens}, expected the square of a divisor of {side}, the patches "
            "of an image's side"
        )
    if tokens > window:
        raise ValueError(
            f"model: {path} has mm_tokens_per_image {tokens} above its sliding_window {window}, so that an image would "
            "not see all of itself on every layer: rollouts and training read that rule differently"
        )
    if vision["hidden_act"] != tower.activation:
        raise ValueError(
            f"model: {path} has vision_config.hidden_act {vision['hidden_act']!r}, expected {tower.activation!r}"
        )
    return VisionSpec(
        tower=tower,
        config=vision | {"vision_use_head": False},  # a head that Gemma 3 never asks
        depth=vision["num_hidden_layers"],
        width=vision["hidden_size"],
        ffn=vision["intermediate_size"],
        out=text["hidden_size"],
        patch=vision["patch_size"],
        temporal_patch=1,
        channels=vision["num_channels"],
        merge=merge,
        positions=side**2,
        deepstack=0,
        image_token=config["image_token_index"],
        video_token=None,
        start_token=config["boi_token_index"],
        end_token=config["eoi_token_index"],
        pad_token=None,
        axes=(),
        side=side,
        norm_eps=vision["layer_norm_eps"],
    )


def extract_text(config: dict) -> dict:
    """Extract the settings of the language model alone."""
    shared = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    return {"tie_word_embeddings": True} | (config.get("text_config") or {}) | shared | {"model_type": "gemma3"}


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: Gemma 3's, and images are bidirectional on all."""
    kinds = read_text_layers(config, path, layer)
    return tuple(replace(kind, rule=replace(kind.rule, images=True)) for kind in kinds)


FAMILY = replace(
    TEXT,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    prefix="language_model.model.",
    output="language_model.lm_head.weight",
    renamed={
        "model.language_model.": "language_model.model.",
        "model.vision_tower.vision_model.": "vision_tower.vision_model.",  # transformers 5.5
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    read_layers=read_layers,
    extract_language=extract_text,
    tower=Tower(
        prefixes={"encoder.": "vision_tower.vision_model.", "projector.": "multi_modal_projector."},
        projector=("projector.",),
        runner="engines.megatron.vision.towers:SiglipTower",
        module="transformers.models.siglip.modeling_siglip:SiglipVisionModel",
        config="transformers.models.siglip.configuration_siglip:SiglipVisionConfig",
        needed=(),
        activation="gelu_pytorch_tanh",
        gated=False,
        weights=list_tower_weights,
        read=read_vision,
        margin="\n\n",
    ),
)
