"""Qwen3.5 with experts in the place of all MLPs, text alone."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.experts._mixture import NEEDED_OF_EXPERTS, ExpertForm, Mixture, place_experts, read_experts
from engines.models.families.text.qwen3_5_text import FAMILY as QWEN3_5
from engines.models.families.text.qwen3_5_text import read_layers as read_dense_layers
from engines.models.layer import LayerKind

_NORMED = "norm_topk_prob"


def read_layers(
    config: dict, path: Path, layer: LayerKind, forms: tuple[ExpertForm, ...] = ("each", "fused")
) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: as Qwen3.5's, with experts; ValueError where their weights are not scaled to add up
    to 1, as transformers always does.

    Args:
        forms: as of ``Mixture``. transformers saves a tensor of each expert.
    """
    if config[_NORMED] is not True:
        raise ValueError(f"model: {path} has {_NORMED} {config[_NORMED]!r}, expected true, as transformers computes")
    kinds = read_dense_layers(config, path, layer)
    mixture = Mixture(read_experts(config, path), forms=forms)
    return place_experts({}, path, kinds, mixture)  # on all of them, whatever a config says


FAMILY = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    needed=(*QWEN3_5.needed, *NEEDED_OF_EXPERTS, "shared_expert_intermediate_size"),
    refused=(*QWEN3_5.refused, "mlp_only_layers"),
    read_layers=read_layers,
    # Neither is in a config: experts' weights are always scaled, and no layer has an MLP whose width would be read.
    defaults=QWEN3_5.defaults | {_NORMED: True, "intermediate_size": 1},
)
