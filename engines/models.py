"""Which models can be trained, read from a HuggingFace folder's config.json alone, before anything heavy starts."""

import json
from dataclasses import dataclass
from pathlib import Path

LAYER_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
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
"""Megatron name within a layer -> (how the HF tensors are joined, HF names within the layer)."""

QKV_BIAS_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "self_attention.linear_qkv.bias": (
        "qkv",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
}

QK_NORM_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm.weight",)),
}

TOP_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("whole", ("model.norm.weight",)),
    "output_layer.weight": ("vocabulary", ("lm_head.weight",)),
}

MODEL_TYPES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "llama": LAYER_NAMES,
    "qwen2": LAYER_NAMES | QKV_BIAS_NAMES,
    "qwen3": LAYER_NAMES | QK_NORM_NAMES,
}
"""HF model_type -> the name table of its layers."""


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder and the names of its weights.

    Attributes:
        folder: the HuggingFace folder. model_type: its ``model_type``, a key of ``MODEL_TYPES``.
        windows: sliding window per layer (tokens seen including oneself), or ``(None,)``.
        rope_theta, rope: base of the rotary embedding and the config's ``rope_parameters``, ``rope_type`` among them.
        tied: the output layer is the transposed embedding.
    """

    folder: str
    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope: dict
    tied: bool
    windows: tuple[int | None, ...]
    max_positions: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelSpec":
        """Read ``config.json``.

        Raises:
            ValueError: no such folder or config, a model type without a name table, or a feature the engine lacks.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            what = "has no config.json" if Path(folder).is_dir() else "does not exist"
            raise ValueError(f"model: folder {str(folder)!r} {what}; give the path of a saved HuggingFace model")
        config = json.loads(path.read_text())
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"model: {path} has model_type {model_type!r}, which has no name table; expected one of "
                f"{sorted(MODEL_TYPES)}; add one in engines/models.py"
            )
        _refuse_unsupported(config, path)
        rope = _rope(config)
        return cls(
            folder=str(Path(folder).absolute()),  # other processes may run elsewhere
            model_type=model_type,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope=rope,
            tied=config.get("tie_word_embeddings", False),
            windows=_windows(config),
            max_positions=config["max_position_embeddings"],
        )

    @property
    def qkv_bias(self) -> bool:
        return "self_attention.linear_qkv.bias" in MODEL_TYPES[self.model_type]

    @property
    def qk_norm(self) -> bool:
        return "self_attention.q_layernorm.weight" in MODEL_TYPES[self.model_type]

    def hf_names(self, megatron_name: str) -> tuple[str, tuple[str, ...]]:
        """How a Megatron parameter is joined, and the HF tensors it is joined from.

        Args:
            megatron_name: such as ``decoder.layers.3.mlp.linear_fc1.weight``, layers numbered over the whole model.

        Raises:
            ValueError: the model's table has no such name.
        """
        if megatron_name in TOP_NAMES:
            return TOP_NAMES[megatron_name]
        layer, _, name = megatron_name.removeprefix("decoder.layers.").partition(".")
        table = MODEL_TYPES[self.model_type]
        if name not in table:
            raise ValueError(f"model: {self.model_type} has no entry for {megatron_name}; add it in engines/models.py")
        kind, names = table[name]
        return kind, tuple(f"model.layers.{layer}.{n}" for n in names)

    def all_hf_names(self) -> set[str]:
        """Every tensor that a saved model of this shape has; a tied output layer is no tensor of its own."""
        tops = {
            name
            for key, (_, names) in TOP_NAMES.items()
            if not (self.tied and key.startswith("output"))
            for name in names
        }
        parts = [name for _, names in MODEL_TYPES[self.model_type].values() for name in names]
        return tops | {f"model.layers.{i}.{name}" for i in range(self.layers) for name in parts}


def _rope(config: dict) -> dict:
    """The rotary settings in the form of today's configs; older ones say ``rope_scaling``, and in it ``type``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def _windows(config: dict) -> tuple[int | None, ...]:
    """Window of each layer. Configs without ``layer_types`` slide on the layers from ``max_window_layers`` up."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not window or not config.get("use_sliding_window"):
        return (None,)
    first = config.get("max_window_layers", layers)
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else (None,)


def _refuse_unsupported(config: dict, path: Path) -> None:
    """Features a llama- or qwen2-shaped config may ask for and the engine would otherwise drop in silence."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"model: {path} sets {key}, which the engine does not build; it must be false")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"model: {path} has hidden_act {config['hidden_act']!r}, expected 'silu'")
    if config.get("attention_dropout"):
        raise ValueError(f"model: {path} has attention_dropout {config['attention_dropout']}; set it to 0")
    kind = _rope(config)["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"model: {path} has rope_type {kind!r}, expected default, linear, llama3 or yarn")
