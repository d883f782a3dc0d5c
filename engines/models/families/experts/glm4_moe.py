"""GLM-4.5 to GLM-4.7: experts chosen by sigmoid scores with a bias, after some dense layers (arXiv:2508.06471)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families._partial_rotary import PARTIAL_ROTARY, read_partial_rope
from engines.models.families._pieces import attention, embedding, final_norm, mlp, qk_norm, qkv_bias
from engines.models.families.experts._mixture import NEEDED_OF_EXPERTS, Mixture, read_experts
from engines.models.family import Family
from engines.models.hf_config import NEEDED
from engines.models.layer import LayerKind
from engines.validation import fits
from hardware.megatron.mixture import Experts

_COUNTS = ("n_shared_experts", "n_group", "topk_group")
_SWITCHES = ("attention_bias", "use_qk_norm")


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: dense below ``first_k_dense_replace``, with experts from there on.

    Raises:
        ValueError: a key has another type, groups do not fit the experts, or no layer has any.
    """
    for key in _SWITCHES:
        if not fits(bool, config[key]):
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected true or false")
    pieces = (attention, *(qkv_bias,) * config["attention_bias"], *(qk_norm,) * config["use_qk_norm"])
    dense = replace(layer, mixer=pieces, rope=read_partial_rope(config, path))
    mixture = Mixture(_read_experts(config, path), shared_place="mlp.shared_experts")
    sparse = replace(dense, mlp=(mixture,), options=replace(dense.options, experts=mixture.experts))
    layers, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    if not fits(int, first) or not 0 <= first < layers:
        raise ValueError(
            f"model: {path} has first_k_dense_replace {first!r}, expected a whole number below its {layers} layers: no "
            "other has experts"
        )
    return tuple(dense if number < first else sparse for number in range(layers))


def _read_experts(config: dict, path: Path) -> Experts:
    """Read the mixture; ValueError for numbers that are missing, of another type or that do not fit each other."""
    experts = read_experts(config | {"num_experts": config["n_routed_experts"]}, path)
    for key in _COUNTS:
        if not fits(int, config[key]) or config[key] < 1:
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected a whole number of at least 1")
    groups, open_groups, scale = config["n_group"], config["topk_group"], config["routed_scaling_factor"]
    size, rest = divmod(experts.count, groups)
    if rest or size < 2 or open_groups > groups or experts.chosen > open_groups * size:
        raise ValueError(
            f"model: {path} has n_group {groups} and topk_group {open_groups}, expected groups of one size, of at "
            f"least two of the {experts.count} experts, and {experts.chosen} experts in topk_group of them"
        )
    if not fits(float, scale) or not scale > 0:
        raise ValueError(f"model: {path} has routed_scaling_factor {scale!r}, expected a number above 0")
    shared = experts.ffn * config["n_shared_experts"]
    choice = {"score": "sigmoid", "scale": scale, "groups": groups, "open_groups": open_groups, "has_bias": True}
    return replace(experts, shared=shared, gates_shared=False, **choice)


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    before=(embedding,),
    layer=LayerKind((attention,), (mlp,)),
    after=(final_norm,),
    needed=(*NEEDED, "num_key_value_heads", "head_dim", "n_routed_experts", *NEEDED_OF_EXPERTS),
    has_predictors=True,
    # vLLM 0.32 leaves the output layer of this model apart, and empty where a folder ties it.
    refused=("mlp_bias", "sliding_window", "quantization_config", "tie_word_embeddings"),
    read_layers=read_layers,
    # transformers' own, where a config leaves them out (Glm4MoeConfig, 5.19)
    defaults={
        "attention_bias": False,
        "use_qk_norm": False,
        PARTIAL_ROTARY: 0.5,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    },
)
