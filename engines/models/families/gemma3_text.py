"""Gemma 3, text alone: norms around attention and MLP, windows on most layers, a rotary base for each kind of layer
(arXiv:2503.19786)."""

from pathlib import Path

from engines.models.families._pieces import attention, embedding, final_norm, qk_norm
from engines.models.family import DecoderSizes, Family
from engines.models.hf_config import NEEDED, check_rope
from engines.models.weight import Weight
from hardware.attention.rules import CAUSAL, Rule
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


def mlp(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the norm of attention's output, an MLP with a gate, and the norms before and after it."""
    hidden, ffn = model.hidden, model.ffn
    gated = {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    return (
        Weight("self_attn_bda.norm.weight", {"post_attention_layernorm.weight": (hidden,)}),
        Weight("pre_mlp_layernorm.weight", {"pre_feedforward_layernorm.weight": (hidden,)}),
        Weight("mlp.linear_fc1.weight", gated, "gated", cut=0),
        Weight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, ffn)}, cut=1),
        Weight("mlp_bda.norm.weight", {"post_feedforward_layernorm.weight": (hidden,)}),
    )


def read_kinds(config: dict, path: Path) -> list[str]:
    """Read the kind of each layer; ValueError where ``layer_types`` are not as many as layers."""
    layers = config["num_hidden_layers"]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PATTERN
    kinds = config.get("layer_types") or [_KINDS[(i + 1) % pattern == 0] for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"model: {path} has {len(kinds)} layer_types, expected one for each of its {layers} layers")
    return kinds


def read_rules(config: dict, path: Path) -> tuple[Rule, ...]:
    """Read the rule of each layer: causal, with a window on sliding layers."""
    window = Rule(window=config["sliding_window"])
    return tuple(window if kind == _KINDS[0] else CAUSAL for kind in read_kinds(config, path))


def read_ropes(config: dict, path: Path) -> tuple[dict, ...]:
    """Read the rotary settings of both kinds of layers, in today's form or in that of the released configs."""
    nested, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if set(nested) - set(_KINDS) or not all(isinstance(rope, dict) for rope in nested.values()):
        raise ValueError(f"model: {path} has rope_parameters {nested}, expected an object for each of {list(_KINDS)}")
    local = {"rope_theta": config.get("rope_local_base_freq", _LOCAL_THETA)} | (nested.get(_KINDS[0]) or {})
    full = {"rope_theta": config.get("rope_theta", _THETA)} | (nested.get(_KINDS[1]) or scaling)
    ropes = check_rope(local, config, path), check_rope(full, config, path)
    if others := {rope["rope_type"] for rope in ropes} - {"default", "linear"}:
        raise ValueError(f"model: {path} has rope_type {others.pop()!r}, expected 'default' or 'linear'")
    return ropes


def read_form(config: dict, path: Path) -> LayerOptions:
    """Read Gemma's options of the layers: norms from one, post-norms, tanh GELU, scales, two kinds of rotary."""
    kinds = tuple(_KINDS.index(kind) for kind in read_kinds(config, path))
    return LayerOptions(
        norms_from_one=True,
        post_norms=True,
        activation="gelu_tanh",
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        scales_embedding=True,
        rotary_kinds=kinds,
    )


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    before=(embedding,),
    layer=(attention, qk_norm, mlp),
    after=(final_norm,),
    needed=NEEDED,
    defaults=_DEFAULTS,
    refused=("attention_bias", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    rules=read_rules,
    ropes=read_ropes,
    form=read_form,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    mixes_windows=True,
)
