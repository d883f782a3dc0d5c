"""Qwen3-VL-MoE: Qwen3-VL with experts in the place of MLPs, which folders have fused and transposed
(arXiv:2511.21631)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.experts._mixture import NEEDED_OF_EXPERTS, Mixture, place_experts, read_experts
from engines.models.families.images.qwen3_vl import FAMILY as QWEN3_VL
from engines.models.families.images.qwen3_vl import TOWER
from engines.models.hf_config import read_layers as read_dense_layers
from engines.models.layer import LayerKind


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: as Qwen3-VL's, with experts on those that have them; ValueError for experts that
    transformers and vLLM would read or weigh differently."""
    experts, hidden = read_experts(config, path), config["hidden_size"]
    if not experts.is_normed:
        raise ValueError(
            f"model: {path} has norm_topk_prob false, expected true: transformers scales the weights of chosen experts "
            "in any event"
        )
    if hidden in (experts.ffn, 2 * experts.ffn):
        raise ValueError(
            f"model: {path} has moe_intermediate_size {experts.ffn}, expected neither hidden_size {hidden} nor half of "
            "it: transformers tells by the shape whether experts are transposed"
        )
    mixture = Mixture(experts, forms=("transposed",))
    return place_experts(config, path, read_dense_layers(config, path, layer), mixture)


_PACKAGE = "transformers.models.qwen3_vl_moe"

FAMILY = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    needed=(*QWEN3_VL.needed, *NEEDED_OF_EXPERTS),
    read_layers=read_layers,
    tower=replace(
        TOWER,
        module=f"{_PACKAGE}.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel",
        config=f"{_PACKAGE}.configuration_qwen3_vl_moe:Qwen3VLMoeVisionConfig",
    ),
)
