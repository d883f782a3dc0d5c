"""The layers of a decoder: the kind of each, and the sizes from which the shapes of its parameters follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines.models.weight import Weight
from hardware.attention.rules import CAUSAL, Rule
from hardware.megatron.form import PLAIN, LayerOptions
from hardware.megatron.mixers import Heads


@dataclass(frozen=True, kw_only=True)
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

    @property
    def attention_heads(self) -> Heads:
        """The heads of attention."""
        return Heads(queries=self.heads, keys=self.kv_heads, dim=self.head_dim)

    def count_kv_heads(self, tp: int) -> int:
        """Count the heads of keys and values on each of ``tp`` ranks, as ``Heads.count_keys``."""
        return self.attention_heads.count_keys(tp)

    def shares_kv_heads(self, tp: int) -> bool:
        """Tell whether each of ``tp`` ranks gets as many heads of keys and values, or each head as many ranks."""
        return self.kv_heads % tp == 0 or tp % self.kv_heads == 0


Piece = Callable[[DecoderSizes], tuple[Weight, ...]]
"""Some parameters of a decoder of given sizes; those of a layer are named within it."""


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: its weights, exports, Megatron modules, masks and planned bytes derive from it.

    Attributes:
        mixer: the parameters that mix tokens (attention, and the norms around it), in Megatron's order.
        mlp: the parameters of the MLP and of the norms around it, after those of ``mixer``.
        rule: its attention rule. rope: its ``rope_parameters`` in a config, with ``rope_type`` and ``rope_theta``.
        options: options of its arithmetic.
    """

    mixer: tuple[Piece, ...]
    mlp: tuple[Piece, ...]
    rule: Rule = CAUSAL
    rope: dict[str, Any] = field(default_factory=dict)
    options: LayerOptions = PLAIN
