"""The form of a decoder's layers, beyond sizes and biases, as data that needs no torch to be read and checked."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerOptions:
    """Options of a layer's arithmetic in which families differ.

    Attributes:
        norms_from_one: a norm scales by 1 + weight, as in Gemma.
        post_norms: outputs of attention and the MLP are normed before they are added to the residual stream.
        activation: of the gated MLP; ``gelu_tanh`` is GELU by its tanh formula.
        attention_scale: of the scores; None is 1 / sqrt(head_dim).
        scales_embedding: token embeddings are multiplied by sqrt(hidden), rounded to the type of the weights.
        scales_rotary: cosines and sines are scaled, possibly above 1, as in yarn.
        rotary_kinds: number of each layer's rotary embedding among the model's, or one for every layer.
    """

    norms_from_one: bool = False
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None
    scales_embedding: bool = False
    scales_rotary: bool = False
    rotary_kinds: tuple[int, ...] = (0,)


PLAIN = LayerOptions()
"""The form of Llama and Qwen."""
