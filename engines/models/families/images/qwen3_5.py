"""Qwen3.5 with images: its language model of gated delta nets, and Qwen3-VL's tower without inner layers' features."""

from dataclasses import replace
from pathlib import Path

from engines.models.families._pieces import TOWER_KEYS
from engines.models.families.images.qwen3_vl import TOWER as QWEN3_VL_TOWER
from engines.models.families.text.qwen3_5_text import FAMILY as QWEN3_5_TEXT
from engines.models.vision import vision_config
from engines.models.vision.vision_config import extract_text
from engines.models.vision.vision_spec import Tower, VisionSpec


def read_vision(config: dict, tower: Tower, path: Path) -> VisionSpec:
    """Read the vision tower; ValueError also for features of inner layers, which transformers would leave out."""
    spec = vision_config.read_vision(config, tower, path)
    if spec.deepstack:
        raise ValueError(
            f"model: {path} has vision_config.deepstack_visual_indexes {spec.config['deepstack_visual_indexes']}, "
            "expected none: transformers adds no features of inner layers"
        )
    return spec


_PACKAGE = "transformers.models.qwen3_5"

TOWER = replace(
    QWEN3_VL_TOWER,
    projector=("merger.",),
    module=f"{_PACKAGE}.modeling_qwen3_5:Qwen3_5VisionModel",
    config=f"{_PACKAGE}.configuration_qwen3_5:Qwen3_5VisionConfig",
    needed=(*TOWER_KEYS, "num_position_embeddings"),
    read=read_vision,
)

FAMILY = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    prefix="model.language_model.",
    extract_language=extract_text,
    tower=TOWER,
)
