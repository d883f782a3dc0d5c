"""Qwen3-MoE: Qwen3 with experts in the place of MLPs, on all layers or some (arXiv:2505.09388)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.experts._mixture import NEEDED_OF_EXPERTS, Mixture, place_experts, read_experts
from engines.models.families.text.qwen3 import FAMILY as QWEN3
from engines.models.hf_config import read_layers as read_dense_layers
from engines.models.layer import LayerKind


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: as Qwen3's, with experts on those that have them."""
    kinds = read_dense_layers(config, path, layer)
    return place_experts(config, path, kinds, Mixture(read_experts(config, path)))


FAMILY = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    needed=(*QWEN3.needed, *NEEDED_OF_EXPERTS),
    # transformers has one window for all layers of this model, vLLM has none.
    refused=(*QWEN3.refused, "use_sliding_window"),
    read_layers=read_layers,
)
