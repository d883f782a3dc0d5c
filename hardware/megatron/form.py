"""The form of a decoder's layers, beyond sizes and biases, as data that needs no torch to be read and checked."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerOptions:
    """A layer's arithmetic, where families differ in more than names.

    Attributes:
        norms_from_one: a norm's weight is what is added to 1, as in Gemma.
        post_norms: what attention and the MLP give is normed before it is added to the residual stream.
        activation: of the gated MLP; ``gelu_tanh`` is GELU by its tanh formula.
        attention_scale: of the scores; None is 1 / sqrt(head_dim).
        scales_embedding: token embeddings are multiplied by sqrt(hidden), rounded to the type of the weights.
        scales_rotary: cosines and sines are multiplied, so that they may be above 1, as yarn's are.
        rotary_kinds: which of the model's rotary embeddings each layer turns by, or one for every layer.
    """

    norms_from_one: bool = False
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None
    scales_embedding: bool = False
    scales_rotary: bool = False
    rotary_kinds: tuple[int, ...] = (0,)

    def get_rotary_kind(self, layer_number: int) -> int:
        """Return the kind of a layer; ``layer_number`` counts from 1 over the whole model."""
        return self.rotary_kinds[0] if len(self.rotary_kinds) == 1 else self.rotary_kinds[layer_number - 1]


PLAIN = LayerOptions()
"""The form of Llama and Qwen."""
