"""A family of models, as a file in engines/models/families states it: all that sets it apart from another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hardware.attention.rules import Rule
from hardware.megatron.form import LayerForm

if TYPE_CHECKING:  # both modules hold a Family
    from engines.models.spec import ModelSpec
    from engines.models.vision_spec import VisionSpec

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the two parameters that are one where embeddings are tied."""

Head = Literal["language", "value"]
"""Kind of output that the last hidden states become: logits, or the value of a critic."""
Part = Literal["vision", "projector", "language"]
"""Parts of a vision-language model: the tower's blocks, the projector of features to tokens, the language model."""
Join = Literal["whole", "qkv", "gated", "vocabulary"]


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter and the HuggingFace tensors that are joined to it along their first axis.

    Attributes:
        name: Megatron's name, within its layer in a family and within the model in a ``ModelSpec``.
        tensors: HF name -> whole shape, in the order in which they are joined.
        join: ``whole`` takes the only tensor as it is. ``qkv`` joins by query group. ``gated`` puts the gate above the
            up projection and splits each over tp by itself. ``vocabulary`` pads the rows to a multiple of the ranks.
            The parts of ``qkv`` and ``gated`` are separate tensors, or one fused tensor in this order.
        cut: the axis that tensor parallelism splits; None where every rank has the whole tensor.
    """

    name: str
    tensors: dict[str, tuple[int, ...]]
    join: Join = "whole"
    cut: int | None = None
    part: Part = "language"

    def within(self, place: str, hf_place: str) -> Weight:
        """Name the same parameter from further out, on both sides."""
        tensors = {hf_place + name: shape for name, shape in self.tensors.items()}
        return replace(self, name=place + self.name, tensors=tensors)

    def cut_shape(self, tp: int) -> tuple[int, ...]:
        """Compute the shape that Megatron gives it on each of ``tp`` tensor-parallel ranks."""
        shapes = list(self.tensors.values())
        shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if self.join == "vocabulary":
            shape[0] = -(-shape[0] // tp) * tp
        if self.cut is not None:
            shape[self.cut] //= tp
        return tuple(shape)


Piece = Callable[["ModelSpec"], tuple[Weight, ...]]
"""Function of a ``ModelSpec`` that returns parameters; a layer's are named within the layer."""


@dataclass(frozen=True)
class Tower:
    """The vision tower of a family, as transformers builds it.

    Attributes:
        prefixes: prefix of names in the tower's module -> prefix in a saved folder.
        projector: prefix, in the module, of the weights that map features to tokens.
        runner: the code that runs it (``engines.megatron.vision.towers``), as ``pkgutil.resolve_name`` takes it.
        module, config: transformers' classes of the tower and of its settings, as ``pkgutil.resolve_name`` takes them.
        needed: keys that ``vision_config`` must have.
        activation: the only ``hidden_act`` that it may have.
        gated: its MLPs have a gate and its norms are RMS norms; else neither.
        weights: gives each weight's name in the module and its shape, in the order of the modules.
        read: reads the tower from a whole config; None reads Qwen's keys.
        margin: newlines before the start token of an image and after its end token.
        video_processor: transformers' class that makes patches of videos.
        no_videos: reason for which videos are refused; empty for a model that takes videos.
        tiles: an image is cut into one or more tiles of one size, and vLLM adds the tokens around them.
    """

    prefixes: dict[str, str]
    projector: tuple[str, ...]
    module: str
    config: str
    needed: tuple[str, ...]
    activation: str
    gated: bool
    weights: Callable[[VisionSpec], dict[str, tuple[int, ...]]]
    runner: str = "engines.megatron.vision.towers:QwenTower"
    read: Callable[[dict, Tower, Path], VisionSpec] | None = None
    margin: str = ""
    video_processor: str = ""
    no_videos: str = "they are not built for this family"
    tiles: bool = False

    def find_folder_name(self, name: str) -> str:
        """Find the name in a saved folder of a weight of the tower's module."""
        begin = next(begin for begin in self.prefixes if name.startswith(begin))
        return self.prefixes[begin] + name.removeprefix(begin)


@dataclass(frozen=True)
class Family:
    """A family of models that differ only in size. Weight names, shapes, planned bytes and refusals derive from it.

    Attributes:
        model_type: HuggingFace's, and the name of the family's file.
        architecture: HuggingFace's class of the language model, or of the whole where there is a tower.
        before, layer, after: the parameters before the layers, of each layer and after them, in the order in which
            Megatron's modules have them. The output layer is the same in every family and not among them.
        needed: keys that ``config.json`` must have.
        refused: keys of features that one engine would build and the other would not; they must be off.
        select: selects the family of the language model from a whole config, where there are several; None is this.
        rules: reads the attention rule of each layer, or one for all; raises ValueError for a rule that is not built.
        defaults: transformers' defaults for keys that a config leaves out.
        ropes: reads the rotary settings of each kind of layer; None reads one for all layers.
        form: reads the options of the layers (norms, activation, scales); None takes those of Llama and Qwen.
        activation: key and only value of the MLP's activation.
        extract_language: extracts the language model's settings from a whole config; None reads Qwen's form.
        mixes_windows: vLLM knows layers with a window and layers without one.
        own_head_dim: heads may have another size than ``hidden_size / num_attention_heads``.
        prefix: prefix of the language model's weights in a saved folder.
        output: name of the output layer's weight in a saved folder, where it is not tied to the embedding.
        renamed: prefix of names in transformers' module -> prefix in a saved folder, where they differ.
    """

    model_type: str
    architecture: str
    before: tuple[Piece, ...]
    layer: tuple[Piece, ...]
    after: tuple[Piece, ...]
    needed: tuple[str, ...]
    refused: tuple[str, ...]
    rules: Callable[[dict, Path], tuple[Rule, ...]]
    defaults: dict[str, Any] = field(default_factory=dict)
    ropes: Callable[[dict, Path], tuple[dict, ...]] | None = None
    form: Callable[[dict, Path], LayerForm] | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    extract_language: Callable[[dict], dict] | None = None
    mixes_windows: bool = False
    own_head_dim: bool = True
    prefix: str = "model."
    output: str = "lm_head.weight"
    renamed: dict[str, str] = field(default_factory=dict)
    tower: Tower | None = None
    select: Callable[[dict, Path], Family] | None = None

    def find_architecture(self, head: Head) -> str:
        """Find the name of HuggingFace's class of a model with this head; a critic is a token classification.

        Transformers has no token classification of a vision-language model. A program that reads this name then
        refuses the critic, instead of loading it as a language model.
        """
        if head == "language":
            return self.architecture
        return re.sub("For(CausalLM|ConditionalGeneration)$", "ForTokenClassification", self.architecture)
