"""Options of a decoder layer beyond sizes and biases, as data that is read and checked without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerOptions:
    """Options of a layer's arithmetic in which model families differ.

    Attributes:
        norms_from_one: whether a norm scales by 1 + weight, as in Gemma.
        post_norms: whether outputs of attention and MLP are normed before they are added to the residual stream.
        activation: activation of the gated MLP; ``gelu_tanh`` is GELU by its tanh formula.
        attention_scale: factor of the scores; None is 1 / sqrt(head_dim).
        scales_embedding: whether token embeddings are multiplied by sqrt(hidden), rounded to the type of the weights.
        scales_rotary: whether cosines and sines are scaled, possibly above 1, as in yarn.
        rotary_kinds: for each layer, the number of its rotary embedding among the model's; or one number for all
            layers.
    """

    norms_from_one: bool = False
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None
    scales_embedding: bool = False
    scales_rotary: bool = False
    rotary_kinds: tuple[int, ...] = (0,)


PLAIN = LayerOptions()
"""The options of Llama and Qwen."""
