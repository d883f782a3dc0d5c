"""A family of models, as a file in engines/models/families states it: all that sets it apart from another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hardware.attention.rules import Rule
from hardware.megatron.form import LayerForm

if TYPE_CHECKING:  # both are read by what a family states, and hold it
    from engines.models.spec import ModelSpec
    from engines.models.vision_spec import VisionSpec

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the two parameters that are one where embeddings are tied."""

Head = Literal["language", "value"]
"""Kind of output that the last hidden states become: logits, or the value of a critic."""
Part = Literal["vision", "projector", "language"]
"""Parts of a vision-language model: the tower's blocks, what maps their features to tokens, and the language model."""
Join = Literal["whole", "qkv", "gated", "vocabulary"]


@dataclass(frozen=True)
class Weight:
    """A parameter of Megatron's, and the tensors of HuggingFace's that it is joined from along their first axis.

    Attributes:
        name: Megatron's. A family names it within its layer, a ``ModelSpec`` within the model.
        tensors: HF name -> whole shape, in the order in which they are joined.
        join: ``whole`` takes the only tensor as it is, ``qkv`` joins by query group, ``gated`` puts the gate above what
            it gates and cuts each for itself, ``vocabulary`` pads the rows to a multiple of the ranks. The parts of
            ``qkv`` and ``gated`` are a tensor each, or one that has them in this order.
        cut: the axis that tensor parallelism cuts; None where every rank has all of it.
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
"""Some parameters of a model of given sizes; those of a layer are named within it."""


@dataclass(frozen=True)
class Tower:
    """The vision tower of a family, as transformers builds it.

    Attributes:
        prefixes: how names begin in the tower's module -> in a saved folder.
        projector: how those names begin in the module of weights that map features to tokens.
        runner: the code that runs it (``engines.megatron.vision.towers``), as ``pkgutil.resolve_name`` takes it.
        module, config: transformers' classes of the tower and of its settings, as ``pkgutil.resolve_name`` takes them.
        needed: keys that ``vision_config`` must have.
        activation: the only ``hidden_act`` that it may have.
        gated: its MLPs have a gate and its norms are RMS norms; else neither.
        weights: gives each weight's name in the module and its shape, in the order of the modules.
        read: reads the tower from a whole config; None reads Qwen's keys.
        margin: newlines before the start token of an image and after its end token.
        video_processor: transformers' class that makes patches of videos.
        no_videos: why the model is shown no videos; empty where it is.
        tiles: an image is cut into tiles of one size, one of them or more, and vLLM adds what marks it.
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
    """Models that differ in their sizes alone. Name table, shapes, planned bytes and refusals all derive from this.

    Attributes:
        model_type: HuggingFace's, and the name of the family's file.
        architecture: HuggingFace's class of the language model, or of the whole where there is a tower.
        before, layer, after: the parameters before the layers, of each layer and after them, in the order in which
            Megatron's modules have them. The output layer is the same in every family and not among them.
        needed: keys that ``config.json`` must have.
        refused: keys of features that one engine would build and the other would not; they must be off.
        select: selects, by a whole config, the family that the model is read as, where there are several language
            models; None is this one.
        rules: reads who may see whom in each layer, or one rule for all; raises ValueError for what is not built.
        defaults: what transformers takes for keys that a config leaves out.
        ropes: reads the rotary settings, those of each kind of layer; None reads one for all.
        form: reads what the layers compute; None is the form of Llama and Qwen.
        activation: key and only value of the MLP's activation.
        extract_language: extracts the settings of the language model from those of the whole; None is as Qwen has them.
        mixes_windows: vLLM knows layers with a window and layers without one.
        own_head_dim: heads may have another size than ``hidden_size / num_attention_heads``.
        prefix: what the names of the language model's weights begin with in a saved folder.
        output: name in a saved folder of the output layer's weight, where that is not the embedding.
        renamed: how names begin in transformers' module -> in a saved folder, where they differ.
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

        Of a vision-language model transformers has none: who goes by that name refuses a critic, and does not take it
        for a model that speaks.
        """
        if head == "language":
            return self.architecture
        return re.sub("For(CausalLM|ConditionalGeneration)$", "ForTokenClassification", self.architecture)
