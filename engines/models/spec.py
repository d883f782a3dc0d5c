"""Which models can be trained, read from a HuggingFace folder's config.json alone, before anything heavy starts."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from engines.models.hf_config import (
    ARCHITECTURES,
    LENGTHS,
    check_keys,
    head_dim_of,
    refuse_unsupported,
    rope_of,
    rules_of,
)
from engines.models.hf_names import LANGUAGE_PREFIX, MODEL_TYPES, TOP_NAMES, VALUE_NAMES, VISION_PREFIX, Names
from engines.models.vision_spec import VISION_TYPES, Part, VisionSpec, language_config, part_of
from engines.validation import read_object
from hardware.attention.rules import Rule


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder and the names of its weights.

    Attributes:
        folder: the HuggingFace folder. model_type: its ``model_type``, a key of ``MODEL_TYPES``.
        rules: attention rule per layer, or one for every layer.
        rope_theta, rope: base of the rotary embedding and the config's ``rope_parameters``, ``rope_type`` among them.
        tied: the output layer is the transposed embedding.
        head: what the last hidden states become, logits or the value of a critic.
        vision: the tower of a vision-language model.
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
    vision: VisionSpec | None = None

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
                f"{sorted(MODEL_TYPES)}; add one in engines/models/hf_names.py"
            )
        vision = None
        if model_type in VISION_TYPES:
            if head == "value":
                raise ValueError(f"model: {path} has model_type {model_type!r}, of which no critic is built; use GRPO")
            vision, config = VisionSpec.from_config(config, path), language_config(config)
        check_keys(config, path)
        refuse_unsupported(config, path, head)
        rope = rope_of(config, path)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"model: {path} has num_key_value_heads {kv_heads}, which does not divide its {heads} heads"
            )
        spec = cls(
            folder=str(Path(folder).absolute()),  # other processes may run elsewhere
            model_type=model_type,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim_of(config, path),
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope=rope,
            tied=config.get("tie_word_embeddings", False) and head == "language",
            rules=rules_of(config, path),
            max_positions=min(config[key] for key in LENGTHS if config.get(key) is not None),
            head=head,
            vision=vision,
        )
        if vision:
            vision.check_language(spec.hidden, spec.head_dim, spec.vocab, path)
        return spec

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Ids that are never sampled and never learned."""
        return self.vision.banned_tokens if self.vision else ()

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
        if self.vision and megatron_name.startswith("vision."):
            return "whole", (VISION_PREFIX[self.model_type] + megatron_name.removeprefix("vision."),)
        layer, _, name = megatron_name.removeprefix("decoder.layers.").partition(".")
        table = MODEL_TYPES[self.model_type]
        if name not in table:
            raise ValueError(
                f"model: {self.model_type} has no entry for {megatron_name}; add it in engines/models/hf_names.py"
            )
        kind, names = table[name]
        return kind, tuple(f"{self._prefix}layers.{layer}.{n}" for n in names)

    @property
    def _prefix(self) -> str:
        return LANGUAGE_PREFIX.get(self.model_type, "model.")

    def _top_names(self) -> Names:
        tops = TOP_NAMES | (VALUE_NAMES if self.head == "value" else {})
        renamed = lambda name: name.replace("model.", self._prefix) if name.startswith("model.") else name  # noqa: E731
        return {key: (kind, tuple(map(renamed, names))) for key, (kind, names) in tops.items()}

    def part_of(self, name: str) -> Part:
        """The part of the model that a tensor of ``all_hf_names`` belongs to."""
        prefix = VISION_PREFIX.get(self.model_type)
        return part_of(f"vision.{name.removeprefix(prefix)}") if prefix and name.startswith(prefix) else "language"

    def name_in_folder(self, name: str) -> str:
        """A parameter of transformers' module of the model -> its name in a saved folder, where they differ."""
        if not self.vision:
            return name
        for own, saved in (("model.language_model.", self._prefix), ("model.visual.", VISION_PREFIX[self.model_type])):
            if name.startswith(own):
                return saved + name.removeprefix(own)
        return name

    def all_hf_names(self) -> set[str]:
        """Every tensor that a saved model of this shape has; a tied output layer is no tensor of its own."""
        tops = {
            name
            for key, (_, names) in self._top_names().items()
            if not (self.tied and key.startswith("output"))
            for name in names
        }
        parts = [name for _, names in MODEL_TYPES[self.model_type].values() for name in names]
        layers = {f"{self._prefix}layers.{i}.{name}" for i in range(self.layers) for name in parts}
        return tops | layers | set(self._vision_shapes)

    @cached_property
    def _vision_shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.vision:
            return {}
        prefix = VISION_PREFIX[self.model_type]
        return {prefix + name: shape for name, shape in self.vision.weight_shapes().items()}

    def optional_hf_names(self) -> set[str]:
        """Tensors that a folder to start from may have or lack: the head of another use of the model."""
        if self.head == "value":
            return {"lm_head.weight", "score.weight", "score.bias"}
        return {"lm_head.weight"} if self.tied else set()

    @property
    def architecture(self) -> str:
        """HuggingFace's class of the model."""
        language = ARCHITECTURES[self.model_type]
        return language if self.head == "language" else language.replace("ForCausalLM", "ForTokenClassification")

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of ``all_hf_names`` or ``optional_hf_names``."""
        if name in (vision := self._vision_shapes):
            return vision[name]
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q_proj": query, "k_proj": keys, "v_proj": keys, "q_norm": self.head_dim, "k_norm": self.head_dim}
        rows |= {"gate_proj": self.ffn, "up_proj": self.ffn, "embed_tokens": self.vocab, "lm_head": self.vocab}
        rows |= {"score": 1}
        columns = {"o_proj": query, "down_proj": self.ffn}
        module, kind = name.split(".")[-2:]
        first = rows.get(module, self.hidden)
        return (first,) if kind == "bias" or module.endswith("norm") else (first, columns.get(module, self.hidden))
