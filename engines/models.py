"""Which models can be trained, read from a HuggingFace folder's config.json alone, before anything heavy starts."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines.checks import fits, spell
from engines.hf_folder import read_object
from engines.hf_names import MODEL_TYPES, TOP_NAMES, VALUE_NAMES, Names
from hardware.rules import CAUSAL, Rule

_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_NEEDED = {
    "llama": (*_SIZES, "rms_norm_eps"),
    # transformers would put numbers of its own for what these leave out.
    "qwen2": (*_SIZES, "rms_norm_eps", "num_key_value_heads"),
    "qwen3": (*_SIZES, "rms_norm_eps", "num_key_value_heads", "head_dim"),
}
"""HF model_type -> the keys that its config must have."""

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Keys that limit the length; vLLM looks at each (0.32, model_arch_config_convertor), and the smallest holds."""

_DTYPE = Literal["float32", "bfloat16", "float16", "float64"] | None

_TYPES: dict[str, Any] = {
    **dict.fromkeys(_LENGTHS, int | None),
    **dict.fromkeys(_SIZES, int),
    "rms_norm_eps": float,
    "num_key_value_heads": int | None,
    "head_dim": int | None,
    "tie_word_embeddings": bool,
    "rope_theta": float | None,
    "rope_parameters": dict[str, Any] | None,
    "rope_scaling": dict[str, Any] | None,
    "use_sliding_window": bool,
    "sliding_window": int | None,
    "max_window_layers": int,
    "layer_types": list[Literal["full_attention", "sliding_attention"]] | None,
    "architectures": list[str] | None,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "bos_token_id": int | None,
    "pad_token_id": int | None,
    "eos_token_id": int | list[int] | None,
    "initializer_range": float,
    "use_cache": bool,
}
"""Key of a config -> what it may hold; transformers refuses most of the rest, but not before vLLM starts."""

_MUST_BE_OFF = {
    "llama": ("attention_bias", "mlp_bias", "bias", "qkv_bias", "sliding_window", "quantization_config"),
    "qwen2": ("attention_bias", "mlp_bias", "qk_norm", "dual_chunk_attention_config", "quantization_config"),
    "qwen3": ("attention_bias", "mlp_bias", "dual_chunk_attention_config", "quantization_config"),
}
"""HF model_type -> keys of features that one engine would build and the other would not."""

_ROPE_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kind of rotary embedding -> the keys that it needs."""


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder and the names of its weights.

    Attributes:
        folder: the HuggingFace folder. model_type: its ``model_type``, a key of ``MODEL_TYPES``.
        rules: attention rule per layer, or one for every layer.
        rope_theta, rope: base of the rotary embedding and the config's ``rope_parameters``, ``rope_type`` among them.
        tied: the output layer is the transposed embedding.
        head: what the last hidden states become, logits or the value of a critic.
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
    rules: tuple[Rule, ...]
    max_positions: int
    head: Literal["language", "value"] = "language"

    @classmethod
    def from_folder(cls, folder: str | Path, head: Literal["language", "value"] = "language") -> "ModelSpec":
        """Read ``config.json``. A critic (``head="value"``) can be read from a language model's folder as well.

        Raises:
            ValueError: no such folder or config, a model type without a name table, or a feature the engine lacks.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            what = "has no config.json" if Path(folder).is_dir() else "does not exist"
            raise ValueError(f"model: folder {str(folder)!r} {what}; give the path of a saved HuggingFace model")
        config = read_object(path)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            raise ValueError(
                f"model: {path} has model_type {model_type!r}, which has no name table; expected one of "
                f"{sorted(MODEL_TYPES)}; add one in engines/hf_names.py"
            )
        _check_keys(config, path)
        _refuse_unsupported(config, path, head)
        rope = _rope(config, path)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"model: {path} has num_key_value_heads {kv_heads}, which does not divide its {heads} heads"
            )
        return cls(
            folder=str(Path(folder).absolute()),  # other processes may run elsewhere
            model_type=model_type,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(config, path),
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope=rope,
            tied=config.get("tie_word_embeddings", False) and head == "language",
            rules=_rules(config, path),
            max_positions=min(config[key] for key in _LENGTHS if config.get(key) is not None),
            head=head,
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
        if megatron_name in (tops := self._top_names()):
            return tops[megatron_name]
        layer, _, name = megatron_name.removeprefix("decoder.layers.").partition(".")
        table = MODEL_TYPES[self.model_type]
        if name not in table:
            raise ValueError(
                f"model: {self.model_type} has no entry for {megatron_name}; add it in engines/hf_names.py"
            )
        kind, names = table[name]
        return kind, tuple(f"model.layers.{layer}.{n}" for n in names)

    def _top_names(self) -> Names:
        return TOP_NAMES | (VALUE_NAMES if self.head == "value" else {})

    def all_hf_names(self) -> set[str]:
        """Every tensor that a saved model of this shape has; a tied output layer is no tensor of its own."""
        tops = {
            name
            for key, (_, names) in self._top_names().items()
            if not (self.tied and key.startswith("output"))
            for name in names
        }
        parts = [name for _, names in MODEL_TYPES[self.model_type].values() for name in names]
        return tops | {f"model.layers.{i}.{name}" for i in range(self.layers) for name in parts}

    def optional_hf_names(self) -> set[str]:
        """Tensors that a folder to start from may have or lack: the head of another use of the model."""
        if self.head == "value":
            return {"lm_head.weight", "score.weight", "score.bias"}
        return {"lm_head.weight"} if self.tied else set()

    @property
    def architecture(self) -> str:
        """HuggingFace's class of the model."""
        return _ARCHITECTURES[self.model_type] + ("ForTokenClassification" if self.head == "value" else "ForCausalLM")

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of ``all_hf_names`` or ``optional_hf_names``."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q_proj": query, "k_proj": keys, "v_proj": keys, "q_norm": self.head_dim, "k_norm": self.head_dim}
        rows |= {"gate_proj": self.ffn, "up_proj": self.ffn, "embed_tokens": self.vocab, "lm_head": self.vocab}
        rows |= {"score": 1}
        columns = {"o_proj": query, "down_proj": self.ffn}
        module, kind = name.split(".")[-2:]
        first = rows.get(module, self.hidden)
        return (first,) if kind == "bias" or module.endswith("norm") else (first, columns.get(module, self.hidden))


def _check_keys(config: dict, path: Path) -> None:
    """Keys that are missing, of a wrong type or out of range."""
    if missing := [key for key in _NEEDED[config["model_type"]] if key not in config]:
        raise ValueError(f"model: {path} lacks the keys {missing}; save the model again with transformers")
    for key, kind in _TYPES.items():
        if key in config and not fits(kind, config[key]):
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected {spell(kind)}")
    for key in (*_SIZES, *_LENGTHS, "num_key_value_heads", "head_dim", "sliding_window"):
        if config.get(key) is not None and config[key] < 1:
            raise ValueError(f"model: {path} has {key} {config[key]}, expected at least 1")
    if not 0 < config["rms_norm_eps"] < 1:
        raise ValueError(f"model: {path} has rms_norm_eps {config['rms_norm_eps']}, expected between 0 and 1")


def _head_dim(config: dict, path: Path) -> int:
    """Size of a head, where every reader of the config finds the same one."""
    hidden, heads, given = config["hidden_size"], config["num_attention_heads"], config.get("head_dim")
    if config["model_type"] == "qwen3":
        if given is None:
            raise ValueError(f"model: {path} has head_dim null, expected a whole number")
    elif hidden % heads:
        raise ValueError(f"model: {path} has num_attention_heads {heads}, which do not divide its hidden_size {hidden}")
    size = hidden // heads if given is None else given
    if config["model_type"] == "qwen2" and size != hidden // heads:
        raise ValueError(
            f"model: {path} has head_dim {given}, expected hidden_size / num_attention_heads = {hidden // heads}: "
            "vLLM knows no other for qwen2"
        )
    if size % 2:
        raise ValueError(f"model: {path} has head_dim {size}, expected an even number: rotary embeddings turn pairs")
    return size


def _rope(config: dict, path: Path) -> dict:
    """The rotary settings in the form of today's configs; older ones say ``rope_scaling``, and in it ``type``."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kinds = {rope[key] for key in ("type", "rope_type") if isinstance(rope.get(key), str)}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPE_NEEDED or len(kinds) > 1:
        said = " and ".join(repr(k) for k in sorted(kinds)) if len(kinds) > 1 else repr(kind)
        raise ValueError(f"model: {path} has rope_type {said}, expected one of {', '.join(_ROPE_NEEDED)}")
    if missing := [key for key in _ROPE_NEEDED[kind] if key not in rope]:
        raise ValueError(f"model: {path} has rope_type {kind!r} without {missing}; save the model again")
    for key in ("rope_theta", *_ROPE_NEEDED[kind]):
        if not fits(float, rope[key]) or not 0 < rope[key] <= sys.float_info.max:
            raise ValueError(f"model: {path} has {key} {rope[key]!r}, expected a number above 0")
    for key, value in rope.items():
        if isinstance(value, dict | list):
            raise ValueError(f"model: {path} has rotary settings of their own for {key!r}, which the engine lacks")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(
            f"model: {path} has partial_rotary_factor {partial!r}, expected 1: the engine turns whole heads"
        )
    return rope


def _rules(config: dict, path: Path) -> tuple[Rule, ...]:
    """Rule of each layer. Configs without ``layer_types`` slide on the layers from ``max_window_layers`` up."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"model: {path} has {len(kinds)} layer_types, expected one for each of its {layers} layers")
    if kinds and "sliding_attention" in kinds and not window:
        raise ValueError(
            f"model: {path} has layer_types with 'sliding_attention', but no window: set use_sliding_window and "
            "sliding_window, or 'full_attention'"
        )
    if not window:
        return (CAUSAL,)
    first = config.get("max_window_layers", 28)  # what transformers takes
    kinds = kinds or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    rules = tuple(Rule(window=window) if kind == "sliding_attention" else CAUSAL for kind in kinds)
    return rules if set(rules) != {CAUSAL} else (CAUSAL,)


def _refuse_unsupported(config: dict, path: Path, head: str) -> None:
    """Features that a config may ask for and an engine would drop in silence."""
    model_type = config["model_type"]
    for key in _MUST_BE_OFF[model_type]:
        if config.get(key):
            raise ValueError(f"model: {path} sets {key}, which the engine does not build; it must be false")
    for key, built in (("hidden_act", "silu"), ("is_causal", True), ("logit_scale", 1)):
        if config.get(key, built) != built:
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected {built!r}")
    if config.get("attention_dropout"):
        raise ValueError(f"model: {path} has attention_dropout {config['attention_dropout']}; set it to 0")
    known = [f"{_ARCHITECTURES[model_type]}ForCausalLM"]
    known += [f"{_ARCHITECTURES[model_type]}ForTokenClassification"] if head == "value" else []
    if config.get("architectures") not in (None, [], *([name] for name in known)):
        expected = " or ".join(f"[{name!r}]" for name in known)
        raise ValueError(f"model: {path} has architectures {config['architectures']}, expected {expected}")
