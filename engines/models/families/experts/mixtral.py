"""Mixtral: Mistral with experts in the place of every MLP (arXiv:2401.04088)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families.experts._mixture import Mixture, place_experts, read_experts
from engines.models.families.text.mistral import FAMILY as MISTRAL
from engines.models.families.text.mistral import SWITCHES
from engines.models.families.text.mistral import read_layers as read_alike
from engines.models.hf_config import NEEDED
from engines.models.layer import LayerKind


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the one kind of all layers: as Mistral's, with experts."""
    sizes = {"moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True}
    experts = read_experts(config | sizes, path)
    return place_experts(
        config, path, read_alike(config, path, layer), Mixture(experts, "block_sparse_moe", ("w1", "w3", "w2"))
    )


FAMILY = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    needed=(*NEEDED, "num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
    defaults={"rope_theta": 1e6},  # transformers' own, where a config leaves it out
    refused=(*SWITCHES, "router_jitter_noise"),
    read_layers=read_layers,
)
