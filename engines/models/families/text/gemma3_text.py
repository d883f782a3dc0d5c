"""Gemma 3, text alone: norms around attention and MLP, windows on most layers, a rotary base for each kind of layer
(arXiv:2503.19786)."""

from dataclasses import replace
from pathlib import Path

from engines.models.families._pieces import attention, embedding, final_norm, qk_norm
from engines.models.family import Family
from engines.models.hf_config import NEEDED, check_rope
from engines.models.joins import GATED
from engines.models.layer import DecoderSizes, LayerKind
from engines.models.weight import Weight
from hardware.attention.rules import Rule
from hardware.megatron.form import LayerOptions

_KINDS = ("sliding_attention", "full_attention")
_DEFAULTS = {
    "vocab_size": 262208,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""Defaults of transformers 5.19 for keys that a config leaves out, as released configs do (Gemma3TextConfig)."""
_PATTERN, _LOCAL_THETA, _THETA = 6, 10000.0, 1000000.0
"""Every sixth layer sees the whole past; the rotary bases of both kinds."""


def post_norm(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the norm of attention's output."""
    return (Weight("self_attn_bda.norm.weight", {"post_attention_layernorm.weight": (model.hidden,)}),)


def mlp(model: DecoderSizes) -> tuple[Weight, ...]:
    """State an MLP with a gate, and the norms before and after it."""
    hidden, ffn = model.hidden, model.ffn
    gated = {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    return (
        Weight("pre_mlp_layernorm.weight", {"pre_feedforward_layernorm.weight": (hidden,)}),
        Weight("mlp.linear_fc1.weight", gated, GATED, cut={0: "tp"}),
        Weight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, ffn)}, cut={1: "tp"}),
        Weight("mlp_bda.norm.weight", {"post_feedforward_layernorm.weight": (hidden,)}),
    )


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: most see through a window, others the whole past, each by a rotary base of its own.

    Raises:
        ValueError: ``layer_types`` are not as many as layers, or a rotary embedding is not built.
    """
    layers = config["num_hidden_layers"]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PATTERN
    kinds = config.get("layer_types") or [_KINDS[(i + 1) % pattern == 0] for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"model: {path} has {len(kinds)} layer_types, expected one for each of its {layers} layers")
    local, full = _read_ropes(config, path)
    layer = replace(layer, options=replace(layer.options, attention_scale=config["query_pre_attn_scalar"] ** -0.5))
    window = Rule(window=config["sliding_window"])
    found = {_KINDS[0]: replace(layer, rule=window, rope=local), _KINDS[1]: replace(layer, rope=full)}
    return tuple(found[kind] for kind in kinds)


def _read_ropes(config: dict, path: Path) -> tuple[dict, dict]:
    """Read the rotary settings of both kinds of layers, in today's form or in that of the released configs."""
    nested, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if set(nested) - set(_KINDS) or not all(isinstance(rope, dict) for rope in nested.values()):
        raise ValueError(f"model: {path} has rope_parameters {nested}, expected an object for each of {list(_KINDS)}")
    local = {"rope_theta": config.get("rope_local_base_freq", _LOCAL_THETA)} | (nested.get(_KINDS[0]) or {})
    full = {"rope_theta": config.get("rope_theta", _THETA)} | (nested.get(_KINDS[1]) or {}) | scaling
    ropes = check_rope(local, config, path), check_rope(full, config, path)
    if others := {rope["rope_type"] for rope in ropes} - {"default", "linear"}:
        raise ValueError(f"model: {path} has rope_type {others.pop()!r}, expected 'default' or 'linear'")
    return ropes


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    before=(embedding,),
    layer=LayerKind(
        (attention, qk_norm, post_norm), (mlp,), options=LayerOptions(norms_from_one=True, post_norms=True)
    ),
    after=(final_norm,),
    needed=NEEDED,
    defaults=_DEFAULTS,
    refused=("attention_bias", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    read_layers=read_layers,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    scales_embedding=True,
    mixes_windows=True,
)
