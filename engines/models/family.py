"""A family of models, as a file in engines/models/families states it: all that sets it apart from another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.models.layer import LayerKind, Piece
from engines.models.weight import Head

if TYPE_CHECKING:  # families of text alone load nothing of images
    from engines.models.vision.vision_spec import Tower


@dataclass(frozen=True)
class Family:
    """A family of models that differ only in size. Weight names, shapes, planned bytes and refusals derive from it.

    Attributes:
        model_type: HuggingFace's, and the name of the family's file.
        architecture: HuggingFace's class of the language model, or of the whole where there is a tower.
        before, after: the parameters before the layers and after them, in the order in which Megatron's modules have
            them. The output layer is the same in every family and not among them.
        layer: the plain layer of the family, with what no config changes.
        read_layers: reads the kind of each layer from a config and the plain layer; raises ValueError for a rule or a
            rotary embedding that is not built.
        needed: keys that ``config.json`` must have.
        refused: keys of features that one engine would build and the other would not; they must be off.
        select: selects the family of the language model from a whole config, where there are several; None is this.
        defaults: transformers' defaults for keys that a config leaves out.
        activation: key and only value of the MLP's activation.
        scales_embedding: token embeddings are multiplied by sqrt(hidden), rounded to the type of the weights.
        extract_language: extracts the language model's settings from a whole config; None reads Qwen's form.
        mixes_windows: vLLM knows layers with a window and layers without one.
        has_predictors: a folder may have layers after the last, which predict further tokens. They are neither read nor
            written.
        kept: how names begin of tensors that a folder may have and that are not trained. A language model is exported
            with them as they were.
        layer_types: entries that ``layer_types`` of a config may have.
        own_head_dim: heads may have another size than ``hidden_size / num_attention_heads``.
        prefix: prefix of the language model's weights in a saved folder.
        output: name of the output layer's weight in a saved folder, where it is not tied to the embedding.
        renamed: prefix of names in transformers' module -> prefix in a saved folder, where they differ.
    """

    model_type: str
    architecture: str
    before: tuple[Piece, ...]
    layer: LayerKind
    after: tuple[Piece, ...]
    needed: tuple[str, ...]
    refused: tuple[str, ...]
    read_layers: Callable[[dict, Path, LayerKind], tuple[LayerKind, ...]]
    defaults: dict[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    scales_embedding: bool = False
    extract_language: Callable[[dict], dict] | None = None
    mixes_windows: bool = False
    has_predictors: bool = False
    kept: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
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
