"""HuggingFace's names of weights, and how Megatron joins them: a table per kind of model."""

Names = dict[str, tuple[str, tuple[str, ...]]]
"""Megatron name -> (how the HF tensors are joined, HF names)."""

LAYER_NAMES: Names = {
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (
        "qkv",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "self_attention.linear_proj.weight": ("whole", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gated", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("whole", ("mlp.down_proj.weight",)),
}
"""Of a layer, names on both sides being those within the layer."""

QKV_BIAS_NAMES: Names = {
    "self_attention.linear_qkv.bias": (
        "qkv",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
}

QK_NORM_NAMES: Names = {
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm.weight",)),
}

TOP_NAMES: Names = {
    "embedding.word_embeddings.weight": ("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("whole", ("model.norm.weight",)),
    "output_layer.weight": ("vocabulary", ("lm_head.weight",)),
}

VALUE_NAMES: Names = {
    "output_layer.weight": ("whole", ("score.weight",)),
    "output_layer.bias": ("whole", ("score.bias",)),
}
"""The head of a critic, in place of a language model's output layer; named as in HuggingFace's token classification."""

MODEL_TYPES: dict[str, Names] = {
    "llama": LAYER_NAMES,
    "qwen2": LAYER_NAMES | QKV_BIAS_NAMES,
    "qwen3": LAYER_NAMES | QK_NORM_NAMES,
    "qwen2_5_vl": LAYER_NAMES | QKV_BIAS_NAMES,
    "qwen3_vl": LAYER_NAMES | QK_NORM_NAMES,
}
"""HF model_type -> the name table of its layers."""

LANGUAGE_PREFIX: dict[str, str] = {"qwen3_vl": "model.language_model."}
"""HF model_type -> what the names of the language model begin with, where it is not ``model.``."""

VISION_PREFIX: dict[str, str] = {"qwen2_5_vl": "visual.", "qwen3_vl": "model.visual."}
"""HF model_type -> what the names of the vision tower begin with."""
