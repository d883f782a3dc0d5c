"""Qwen3-Next: gated delta nets on most layers, gated attention on the others, and experts in the place of MLPs."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.experts._mixture import NEEDED_OF_EXPERTS, Mixture, place_experts, read_experts
from engines.models.families.text.qwen3_5_text import FAMILY as QWEN3_5
from engines.models.families.text.qwen3_5_text import read_layers as read_state_layers
from engines.models.layer import LayerKind


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: as Qwen3.5's, with experts on those that have them."""
    kinds = read_state_layers(config, path, layer, is_fused=True)
    return place_experts(config, path, kinds, Mixture(read_experts(config, path)))


FAMILY = replace(
    QWEN3_5,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    needed=(*QWEN3_5.needed, *NEEDED_OF_EXPERTS, "shared_expert_intermediate_size"),
    # vLLM 0.32 leaves the output layer of this model apart, and empty where a folder ties it.
    refused=(*QWEN3_5.refused, "tie_word_embeddings"),
    read_layers=read_layers,
)
