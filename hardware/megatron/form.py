"""Options of a decoder's layers beyond sizes and biases, as data that is read and checked without torch."""

from dataclasses import dataclass
from typing import Literal

from hardware.megatron.mixers import ATTENTION, Mixer

NO_ROUTE = -1
"""Stands for no expert where a token's experts are given: a layer without experts, or a token that was not routed."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of a layer's MLP.

    Attributes:
        count: experts of the layer. chosen: experts of each token. ffn: width of an expert.
        is_normed: the weights of a token's chosen experts are scaled to add up to 1.
        shared: width of an expert that every token goes through; 0 without one.
        gates_shared: the shared expert's output is scaled by a gate.
        score: function that makes an expert's weights of the router's logits.
        scale: factor of the weights of chosen experts.
        groups, open_groups: experts are in so many groups of equal size, and a token chooses among the experts of so
            many groups, those whose two best experts score highest together.
        has_bias: a bias of each expert, which no gradient moves, is added to its score for the choice alone.
    """

    count: int
    chosen: int
    ffn: int
    is_normed: bool
    shared: int = 0
    gates_shared: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    open_groups: int = 1
    has_bias: bool = False


@dataclass(frozen=True)
class LayerOptions:
    """Options of a layer's arithmetic in which families differ, or layers of one.

    Attributes:
        norms_from_one: whether a norm scales by 1 + weight, as in Gemma.
        post_norms: whether outputs of attention and MLP are normed before they are added to the residual stream.
        activation: activation of the gated MLP; ``gelu_tanh`` is GELU by its tanh formula.
        attention_scale: factor of the scores; None is 1 / sqrt(head_dim).
        rotary: number of the layer's rotary embedding among the model's.
        scales_rotary: whether its cosines and sines are scaled, possibly above 1, as in yarn.
        gates_output: whether attention's output is scaled by a gate of each of its entries.
        mixer: what mixes the layer's tokens.
        experts: the mixture in the place of the MLP; None for an MLP.
    """

    norms_from_one: bool = False
    post_norms: bool = False
    attention_scale: float | None = None
    rotary: int = 0
    scales_rotary: bool = False
    gates_output: bool = False
    mixer: Mixer = ATTENTION
    experts: Experts | None = None


PLAIN = LayerOptions()
"""The options of Llama and Qwen."""
