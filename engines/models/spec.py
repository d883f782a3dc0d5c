"""The shape of a model, read from a HuggingFace folder's config.json alone, before anything heavy starts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models.families import find_family
from engines.models.family import Family
from engines.models.hf_config import LENGTHS, check_keys, read_head_dim, refuse_unsupported
from engines.models.hub import find_here
from engines.models.joins import Vocabulary
from engines.models.layer import DecoderSizes, LayerKind
from engines.models.safetensors_folder import list_tensor_names
from engines.models.weight import OUTPUT, Head, Part, Weight
from engines.validation import read_object
from hardware.attention.rules import Rule
from hardware.megatron.form import LayerOptions
from hardware.megatron.mixers import Mixer

if TYPE_CHECKING:  # a spec is read before anything takes the time to import torch; of text alone without images
    from torch import Tensor

    from engines.models.vision.vision_spec import VisionSpec
    from hardware.megatron.mixture import Experts


@dataclass(frozen=True, kw_only=True)
class ModelSpec(DecoderSizes):
    """The shape of a decoder and the names of its weights.

    Attributes:
        folder: the HuggingFace folder. family: the family of its ``model_type``.
        kinds: the kind of each layer.
        tied: the output layer is the transposed embedding.
        head: output of the last hidden states: logits, or a critic's value.
        vision: the tower of a vision-language model.
    """

    folder: str
    family: Family
    kinds: tuple[LayerKind, ...]
    norm_eps: float
    tied: bool
    max_positions: int
    head: Head = "language"
    vision: "VisionSpec | None" = None

    @classmethod
    def from_folder(cls, folder: str | Path, head: Head = "language") -> "ModelSpec":
        """Read ``config.json``. A critic (``head="value"``) can be read from a language model's folder as well.

        Raises:
            ValueError: folder or config is missing, the model type has no family, or the engine lacks a feature.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            problem = "has no config.json" if Path(folder).is_dir() else "does not exist"
            raise ValueError(
                f"model: folder {str(folder)!r} {problem}; give the path of a saved HuggingFace model, or hf:ORG/NAME "
                "for one of the hub"
            )
        config = read_object(path)
        family, vision = find_family(config.get("model_type"), path), None
        if family.select:
            family = family.select(config, path)
        if family.tower:
            vision = family.tower.read(config, family.tower, path)
        if family.extract_language:
            config = family.extract_language(config)
        config = family.defaults | config
        check_keys(config, path, family)
        refuse_unsupported(config, path, family, head)
        heads, head_dim = config["num_attention_heads"], read_head_dim(config, path, family)
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"model: {path} has num_key_value_heads {kv_heads}, which does not divide its {heads} heads"
            )
        spec = cls(
            folder=str(Path(folder).absolute()),  # other processes may run elsewhere
            family=family,
            kinds=family.read_layers(config, path, family.layer),
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            tied=config.get("tie_word_embeddings", False) and head == "language",
            max_positions=min(config[key] for key in LENGTHS if config.get(key) is not None),
            head=head,
            vision=vision,
        )
        if vision:
            vision.check_language(spec.hidden, spec.rotary_dim, spec.vocab, path)
        return spec

    def move_here(self) -> "ModelSpec":
        """Return the same model in the folder that has it on this machine: caches of the hub may lie elsewhere.

        Raises:
            ValueError: it is of the hub's cache, and this machine's lacks it.
        """
        return replace(self, folder=find_here(self.folder))

    def require_vision(self) -> "VisionSpec":
        """Return the vision tower of a model that must have one; ValueError for a language model."""
        if not self.vision:
            raise ValueError(f"model: {self.folder!r} has no vision tower and is given images; take one that has")
        return self.vision

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Ids that are never sampled and never learned."""
        return self.vision.banned_tokens if self.vision else ()

    @property
    def model_type(self) -> str:
        """HuggingFace's name of the family, as the model's config has it."""
        return self.family.model_type

    @property
    def architecture(self) -> str:
        """HuggingFace's class of the model."""
        return self.family.find_architecture(self.head)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Attention rule of each layer, or one for every layer."""
        rules = tuple(kind.rule for kind in self.kinds)
        return rules if len(set(rules)) > 1 else rules[:1]

    @cached_property
    def ropes(self) -> tuple[dict, ...]:
        """Rotary settings that layers have, each once."""
        ropes = [kind.rope for kind in self.kinds]
        return tuple(rope for i, rope in enumerate(ropes) if rope not in ropes[:i])

    @property
    def rotary_dim(self) -> int:
        """Number of a head's first entries that rotary embeddings turn, alike in all layers."""
        return int(self.head_dim * self.ropes[0].get("partial_rotary_factor", 1))

    @cached_property
    def options(self) -> tuple[LayerOptions, ...]:
        """Options of each layer, which tell its rotary embedding among ``ropes`` too."""
        rotary = [
            {"rotary": self.ropes.index(k.rope), "scales_rotary": k.rope["rope_type"] == "yarn"} for k in self.kinds
        ]
        return tuple(replace(kind.options, **found) for kind, found in zip(self.kinds, rotary, strict=True))

    @property
    def mlp_widths(self) -> dict[str, int]:
        """Widths of the MLPs that layers have, which tensor parallelism cuts, by their name in a message."""
        widths = {"ffn size": self.ffn} if any(not kind.options.experts for kind in self.kinds) else {}
        shared = self.experts.shared if self.experts else 0
        return widths | ({"shared expert's ffn size": shared} if shared else {})

    @property
    def experts(self) -> "Experts | None":
        """Mixture of the layers that have one, alike in all of them; None of a dense model."""
        return next((kind.options.experts for kind in self.kinds if kind.options.experts), None)

    @property
    def activation(self) -> str:
        """HuggingFace's name of the MLPs' activation."""
        return self.family.activation[1]

    @property
    def qkv_bias(self) -> bool:
        """Queries, keys and values have biases."""
        return any(name.endswith("self_attention.linear_qkv.bias") for name in self.weights)

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normed head by head."""
        return any(name.endswith("self_attention.q_layernorm.weight") for name in self.weights)

    @property
    def gates_output(self) -> bool:
        """Outputs of attention are scaled by gates, in all layers that have attention."""
        return any(kind.options.gates_output for kind in self.kinds)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        return tuple(kind.options.mixer for kind in self.kinds)

    def count_cached(self, tp: int) -> int:
        """Count the numbers that a rollout device of ``tp`` keeps of each token, in all layers."""
        return sum(mixer.count_cached(self.attention_heads, tp) for mixer in self.mixers)

    @cached_property
    def pair_flops(self) -> int:
        """FLOPs of a forward pass of all layers for each pair of a query and a key that it sees."""
        return sum(mixer.count_pair_flops(self.attention_heads) for mixer in self.mixers)

    @cached_property
    def token_flops(self) -> int:
        """FLOPs of a forward pass of all layers for each token, beside products with weights."""
        return sum(mixer.count_token_flops() for mixer in self.mixers)

    @cached_property
    def mixer_cuts(self) -> dict[str, int]:
        """Numbers of mixers that tensor parallelism must divide, by name in a message."""
        return {name: count for mixer in set(self.mixers) for name, count in mixer.list_cuts().items()}

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Every parameter and buffer by Megatron's name, in its modules' order, layers numbered over the whole model.

        A tied output layer is not a parameter of its own.
        """
        family, prefix = self.family, self.family.prefix
        parameters = [weight.within("", prefix) for piece in family.before for weight in piece(self)]
        for i, kind in enumerate(self.kinds):
            layer = [weight for piece in (*kind.mixer, *kind.mlp) for weight in piece(self)]
            parameters += [weight.within(f"decoder.layers.{i}.", f"{prefix}layers.{i}.") for weight in layer]
        parameters += [weight.within("", prefix) for piece in family.after for weight in piece(self)]
        if not self.tied:
            parameters += _make_value_head(self) if self.head == "value" else _make_language_head(self)
        if self.vision:
            parameters += self.vision.weights()
        return {weight.name: weight for weight in self._choose_forms(parameters)}

    def _choose_forms(self, weights: Sequence[Weight]) -> list[Weight]:
        """Choose the form in which the folder has each weight; the first where it has none.

        Raises:
            ValueError: it has weights in several forms.
        """
        with_forms = [weight for weight in weights if weight.other_forms]
        if not with_forms:
            return list(weights)
        names = list_tensor_names(self.folder)
        example_of_form: dict[int, str] = {}
        for weight in with_forms:
            for number, form in enumerate((weight, *weight.other_forms)):
                if there := names.intersection(form.tensors):
                    example_of_form.setdefault(number, min(there))
        if len(example_of_form) > 1:
            examples = " and ".join(sorted(example_of_form.values()))
            raise ValueError(
                f"model: {self.folder!r} has weights in several forms, such as {examples}, expected one form of all; "
                "save the model again, or copy it again"
            )
        chosen = min(example_of_form, default=0)
        return [(weight, *weight.other_forms)[chosen] if weight.other_forms else weight for weight in weights]

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names in a saved folder of the tensors that are buffers: they have no gradient, and are in fp32."""
        return frozenset(name for weight in self.weights.values() if weight.is_buffer for name in weight.tensors)

    def find_weight(self, megatron_name: str) -> Weight:
        """Find the tensors that a Megatron parameter is joined from.

        Args:
            megatron_name: for instance ``decoder.layers.3.mlp.linear_fc1.weight``, with layers numbered over the model.

        Raises:
            ValueError: the model's family does not have this parameter.
        """
        if megatron_name not in self.weights:
            raise ValueError(
                f"model: {self.model_type} states no parameter {megatron_name}, which Megatron has; state it in its "
                "file in engines/models/families"
            )
        return self.weights[megatron_name]

    def find_part(self, name: str) -> Part:
        """Find the part of the model that a tensor of ``list_hf_names`` belongs to."""
        return next(weight.part for weight in self.weights.values() if name in weight.tensors)

    def find_folder_name(self, name: str) -> str:
        """Find the name in a saved folder of a parameter of transformers' module, which may be another."""
        for prefix, saved in self.family.renamed.items():
            if name.startswith(prefix):
                return saved + name.removeprefix(prefix)
        return name

    def find_module_name(self, name: str) -> str:
        """Find the name of a tensor of a saved folder in transformers' module: the inverse of ``find_folder_name``."""
        for prefix, saved in reversed(self.family.renamed.items()):  # of two for one, the newer
            if name.startswith(saved):
                return prefix + name.removeprefix(saved)
        return name

    def split_parameter(self, name: str, values: "Tensor") -> "dict[str, Tensor]":
        """Split a parameter of transformers' module, or its gradient: name of a tensor in a saved folder -> tensor."""
        name = self.find_folder_name(name)
        if (weight := self._joined_in_module.get(name)) is None:
            return {name: values}
        return weight.join.split_module(values, weight.tensors)

    @cached_property
    def _joined_in_module(self) -> dict[str, Weight]:
        return {weight.module: weight for weight in self.weights.values() if weight.module}

    def is_predictor(self, name: str) -> bool:
        """Tell whether a tensor of a folder is of a layer after the last, which predicts further tokens."""
        place = re.match(rf"{re.escape(self.family.prefix)}layers\.(\d+)\.", name)
        return self.family.has_predictors and place is not None and int(place[1]) >= self.layers

    def list_hf_names(self) -> set[str]:
        """List the tensors that a saved model of this shape has; a tied output layer is no tensor of its own."""
        return {name for weight in self.weights.values() for name in weight.tensors}

    def list_optional_hf_names(self) -> set[str]:
        """List the tensors that a folder to start from may have or lack: the head of another use of the model."""
        optional = [*_make_language_head(self), *_make_value_head(self)] if self.head == "value" else []
        optional += _make_language_head(self) if self.tied else []
        return {name for weight in optional for name in weight.tensors}

    def find_hf_shape(self, name: str) -> tuple[int, ...]:
        """Find the shape of a tensor of ``list_hf_names`` or ``list_optional_hf_names``."""
        return self._hf_shapes[name]

    def count_weights(self) -> int:
        """Count the elements of the tensors of ``list_hf_names``."""
        return sum(math.prod(self.find_hf_shape(name)) for name in self.list_hf_names())

    def count_training_flops(
        self, lengths: Sequence[int], computed_tokens: float | None = None, frozen: bool = False
    ) -> float:
        """Count the FLOPs of a forward and a backward pass of the language model over sequences: six for each weight
        and token, four for a frozen one, without an embedding that is only looked up; attention's two products as if
        each of its layers were causal and had no window; and three products of a state with each token. Adapters,
        recomputation and padding are left out (Chowdhery et al., arXiv:2204.02311, B).

        Args:
            lengths: tokens of each sequence. computed_tokens: in all, where sequences share their beginnings.
            frozen: the weights get no gradients: adapters learn in their place.
        """
        weights = sum(self.count_used_weights())
        tokens = sum(lengths) if computed_tokens is None else computed_tokens
        pairs = sum(length**2 for length in lengths) / 2
        each = 4.0 if frozen else 6.0
        # A backward pass takes twice the FLOPs of a forward pass.
        return (each * weights + 3.0 * self.token_flops) * tokens + 3.0 * self.pair_flops * pairs

    def count_used_weights(self) -> tuple[float, float]:
        """Count the weights of the language model by which a token is multiplied: those of its layers, of experts its
        own alone, and those of its head."""
        named = (w for w in self.weights.values() if w.part in ("language", "router") and not w.is_buffer)
        used = self.experts.chosen / self.experts.count if self.experts else 1
        weights = sum(
            math.prod(shape) * (used if "ep" in weight.cut.values() else 1)
            for weight in named
            for shape in weight.tensors.values()
        )
        lookup, head = self.vocab * self.hidden, self.hidden * (1 if self.head == "value" else self.vocab)
        return weights - lookup - (0 if self.tied else head), head

    @cached_property
    def _hf_shapes(self) -> dict[str, tuple[int, ...]]:
        weights = [*self.weights.values(), *_make_language_head(self), *_make_value_head(self)]
        return {name: shape for weight in weights for name, shape in weight.tensors.items()}


def _make_language_head(model: ModelSpec) -> list[Weight]:
    return [Weight(OUTPUT, {model.family.output: (model.vocab, model.hidden)}, Vocabulary(), {0: "tp"})]


def _make_value_head(model: ModelSpec) -> list[Weight]:
    """Make a critic's head, named as in HuggingFace's token classification."""
    bias = Weight(OUTPUT.replace("weight", "bias"), {"score.bias": (1,)}, is_head=True)
    return [Weight(OUTPUT, {"score.weight": (1, model.hidden)}, is_head=True), bias]
