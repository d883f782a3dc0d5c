"""Options of a decoder's layers beyond sizes and biases, as data that is read and checked without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware.megatron.mixers import ATTENTION, Mixer

if TYPE_CHECKING:  # models without experts load nothing of them
    from hardware.megatron.mixture import Experts

NO_ROUTE = -1
"""Stands for no expert where a token's experts are given: a layer without experts, or a token that was not routed."""


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
