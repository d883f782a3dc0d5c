"""Options of a decoder's layers, beyond sizes and biases, as data that needs no torch to be read and checked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerOptions:
    """Options of a layer's arithmetic in which families differ, or layers of one.

    Attributes:
        norms_from_one: a norm scales by 1 + weight, as in Gemma.
        post_norms: outputs of attention and the MLP are normed before they are added to the residual stream.
        attention_scale: of the scores; None is 1 / sqrt(head_dim).
        rotary: number of its rotary embedding among the model's.
        scales_rotary: its cosines and sines are scaled, possibly above 1, as in yarn.
    """

    norms_from_one: bool = False
    post_norms: bool = False
    attention_scale: float | None = None
    rotary: int = 0
    scales_rotary: bool = False


PLAIN = LayerOptions()
"""The options of Llama and Qwen."""
