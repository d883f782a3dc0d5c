"""Qwen3.5 and Qwen3.6 with experts and images: Qwen3.5's tower before its language model of experts."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.experts.qwen3_5_moe_text import FAMILY as QWEN3_5_MOE_TEXT
from engines.models.families.experts.qwen3_5_moe_text import read_layers as read_text_layers
from engines.models.families.images.qwen3_5 import FAMILY as QWEN3_5
from engines.models.families.images.qwen3_5 import TOWER
from engines.models.layer import LayerKind


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer, as of the text alone; released folders have their experts fused."""
    return read_text_layers(config, path, layer, forms=("fused", "each"))


_PACKAGE = "transformers.models.qwen3_5_moe"

FAMILY = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    prefix=QWEN3_5.prefix,
    extract_language=QWEN3_5.extract_language,
    read_layers=read_layers,
    tower=replace(
        TOWER,
        module=f"{_PACKAGE}.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel",
        config=f"{_PACKAGE}.configuration_qwen3_5_moe:Qwen3_5MoeVisionConfig",
    ),
)
