"""Tests run these tiny models: each family of ``support.factors``, and some with a setting of their own.

``rlworker.checks.tiny.models`` makes them, as it does those of ``rlworker check``.
"""

import json
from pathlib import Path
from typing import Any

from support.factors import IMAGE_STATE_FAMILIES

from engines.models.spec import ModelSpec
from rlworker.checks.tiny.models import GLM_EXPERTS, LARGE_WEIGHTS, make_bare_tokenizer, make_tiny_text, make_tiny_vlm
from rlworker.checks.tiny.states import STATE_MODELS

VOCAB = 99  # odd, so that tensor parallelism has to pad it
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
_LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,  # not head_dim
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 48}),  # not hidden / heads
    # Sliding windows on the upper half of the layers.
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    # A head of keys and values that all tensor-parallel ranks share.
    "qwen2-one-head": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3-one-head": ("qwen3", {"head_dim": 48, "num_key_value_heads": 1}),
    "llama-rope3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "gemma3_text": ("gemma3_text", _GEMMA),
    "mistral": ("mistral", {"head_dim": 48, "sliding_window": 5}),  # on every layer
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"head_dim": 48}),  # of whose 48 entries 24 turn
    "qwen3_moe": ("qwen3_moe", {"head_dim": 48} | _EXPERTS),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", GLM_EXPERTS | {"head_dim": 48, "attention_bias": True, "use_qk_norm": True}),
    # As GLM-4.5-Air: no norms of queries and keys, all experts in one group.
    "glm4_moe-air": (
        "glm4_moe",
        GLM_EXPERTS | {"head_dim": 32, "attention_bias": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    **{name: (name, settings) for name, settings in STATE_MODELS.items()},
    # A dense first layer, and weights of chosen experts that are not scaled.
    "qwen3_next-dense": (
        "qwen3_next",
        STATE_MODELS["qwen3_next"] | {"mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5}),
    # Experts on the first half of the layers or on the second, so that a pipeline stage may have none.
    "qwen3_moe-early": ("qwen3_moe", {"head_dim": 48} | _EXPERTS | {"mlp_only_layers": [2, 3]}),
    "qwen3_moe-late": ("qwen3_moe", {"head_dim": 48} | _EXPERTS | {"mlp_only_layers": [0, 1]}),
    # A dense first layer; the chosen experts' weights are not scaled to add up to 1.
    "qwen3_moe-dense": ("qwen3_moe", {"head_dim": 48} | _EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": False}),
}
"""Name -> HF model_type and the settings that differ."""
MODERATE_WEIGHTS = {"initializer_range": 0.04}
"""Of a model with images and states, whose outputs are normed: by larger weights HuggingFace's own gradients in fp32
are 1.7e-6 off."""


def make_language_model(folder: Path, name: str, tied: bool) -> str:
    family, settings = LANGUAGE_MODELS[name]
    return make_tiny_text(folder, family, VOCAB, tied=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)


def write_config(folder: Path, base: str | Path | dict[str, Any], **changes: Any) -> str:
    """Write config.json with some keys changed, ``part.key`` within a part, from a dict or that of a folder.

    A key that is ``...`` is left out. Returns the folder.
    """
    config = json.loads(json.dumps(base) if isinstance(base, dict) else Path(base, "config.json").read_text())
    for key, value in changes.items():
        *outer, last = key.split(".")
        section = config[outer[0]] if outer else config
        section.pop(last, None)
        section |= {} if value is ... else {last: value}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def read_config(folder: Path, base: str | Path | dict[str, Any], **changes: Any) -> ModelSpec:
    """Read the model of a config.json as ``write_config`` writes it."""
    return ModelSpec.from_folder(write_config(folder, base, **changes))


def make_critic(folder: Path, language_model: str) -> str:
    """Save a token classification with one label, its body the language model's."""
    import torch
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(language_model, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    torch.nn.init.constant_(model.score.bias, 0.3)
    model.save_pretrained(folder)
    return str(folder)


def make_vlm(folder: Path, family: str, tied: bool = False, fused: bool = True, **language: Any) -> str:
    """Save a vision-language model of a family with images, image tokens from 90 on.

    Args:
        fused: as of ``make_tiny_vlm``. language: settings of the language model that differ.
    """
    scale = MODERATE_WEIGHTS if family in IMAGE_STATE_FAMILIES else LARGE_WEIGHTS
    settings: dict[str, Any] = {"language": scale | language, "vision": LARGE_WEIGHTS, "fused": fused}
    return make_tiny_vlm(folder, family, make_bare_tokenizer(89), VOCAB, tied=tied, **settings)
