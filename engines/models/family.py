"""A family of models, as a file in engines/models/families states it: all that sets it apart from another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.models.weight import Head, Weight
from hardware.attention.rules import Rule
from hardware.megatron.form import LayerOptions

if TYPE_CHECKING:  # families of text alone load nothing of images
    from engines.models.vision_spec import Tower


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder, from which the shapes of its parameters follow.

    Attributes:
        ffn: width of an MLP. kv_heads: heads of keys and values. vocab: rows of the embedding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


Piece = Callable[[DecoderSizes], tuple[Weight, ...]]
"""Some parameters of a decoder of given sizes; those of a layer are named within it."""


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
        rules: reads the attention rule of each layer, or one for all; raises ValueError for rules that are not built.
        defaults: transformers' values for keys that a config leaves out.
        ropes: reads the rotary settings, those of each kind of layer; None reads one for all.
        form: reads the options of the layers; None is the form of Llama and Qwen.
        activation: key and only value of the MLP's activation.
        extract_language: extracts the settings of the language model from those of the whole; None where they are one.
        mixes_windows: vLLM knows layers with a window and layers without one.
        own_head_dim: heads may have another size than ``hidden_size / num_attention_heads``.
        prefix: begins the names of the language model's weights in a saved folder.
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
    form: Callable[[dict, Path], LayerOptions] | None = None
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

        Transformers has none of a vision-language model: readers that look up the name refuse such a critic, rather
        than take it for a language model.
        """
        if head == "language":
            return self.architecture
        return re.sub("For(CausalLM|ConditionalGeneration)$", "ForTokenClassification", self.architecture)
