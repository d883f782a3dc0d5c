"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1): norms around attention and MLP, heads of which neighbouring entries turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models.families._partial_rotary import PARTIAL_ROTARY, read_partial_rope
from engines.models.families._pieces import attention, embedding, final_norm, fused_mlp, group_queries, qkv_bias
from engines.models.family import Family
from engines.models.hf_config import NEEDED
from engines.models.joins import Grouped, Shape
from engines.models.layer import DecoderSizes, LayerKind
from engines.models.weight import Weight
from engines.validation import fits
from hardware.megatron.form import LayerOptions

if TYPE_CHECKING:  # families are read before anything takes the time to import torch
    from torch import Tensor

_BIAS = "attention_bias"


@dataclass(frozen=True)
class NeighboursTurn(Grouped):
    """Groups queries, keys and values whose heads turn neighbouring entries, as halves that turn.

    Of the entries of a head that turn, Megatron has the first of each pair above the second of each. Queries and keys
    change places alike, so that their products stay.

    Attributes:
        head_dim: rows of a head. rotary_dim: how many of them turn, the first.
    """

    head_dim: int = 2
    rotary_dim: int = 2

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = tensors
        return super().join([self._move(query, sides=(-1, 2)), self._move(key, sides=(-1, 2)), value])

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        query, key, value = super().split(whole, shapes)
        return [self._move(query, sides=(2, -1)), self._move(key, sides=(2, -1)), value]

    def _move(self, rows: Tensor, sides: tuple[int, int]) -> Tensor:
        """Exchange the axes of the entries that turn, which are a matrix with these sides."""
        heads = rows.unflatten(0, (-1, self.head_dim))
        turned = heads[:, : self.rotary_dim].unflatten(1, sides).transpose(1, 2).flatten(1, 2)
        moved = heads.clone()
        moved[:, : self.rotary_dim] = turned
        return moved.flatten(0, 1)


@dataclass(frozen=True)
class TurnedAttention:
    """States attention of which neighbouring entries turn, and the norms before and after it; a ``Piece``."""

    rotary_dim: int
    has_bias: bool

    def __call__(self, model: DecoderSizes) -> tuple[Weight, ...]:
        groups = group_queries(model)
        join = NeighboursTurn(
            groups=groups.groups, runs=groups.runs, head_dim=model.head_dim, rotary_dim=self.rotary_dim
        )
        norm, output, qkv = attention(model)
        biases = qkv_bias(model) if self.has_bias else ()
        after = Weight("self_attn_bda.norm.weight", {"post_self_attn_layernorm.weight": (model.hidden,)})
        return norm, output, *(replace(weight, join=join) for weight in (qkv, *biases)), after


def post_mlp_norm(model: DecoderSizes) -> tuple[Weight, ...]:
    """State the norm of the MLP's output."""
    return (Weight("mlp_bda.norm.weight", {"post_mlp_layernorm.weight": (model.hidden,)}),)


def read_layers(config: dict, path: Path, layer: LayerKind) -> tuple[LayerKind, ...]:
    """Read the one kind of all layers; ValueError for a switch of another type or a rotary embedding that is not
    built."""
    if not fits(bool, config[_BIAS]):
        raise ValueError(f"model: {path} has {_BIAS} {config[_BIAS]!r}, expected true or false")
    rope = read_partial_rope(config, path)
    turned = int(rope[PARTIAL_ROTARY] * config["head_dim"])
    mixer = TurnedAttention(rotary_dim=turned, has_bias=config[_BIAS])
    return (replace(layer, mixer=(mixer,), rope=rope),) * config["num_hidden_layers"]


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    before=(embedding,),
    layer=LayerKind((attention,), (fused_mlp, post_mlp_norm), options=LayerOptions(post_norms=True)),
    after=(final_norm,),
    needed=(*NEEDED, "num_key_value_heads", "head_dim"),
    refused=("mlp_bias", "sliding_window", "quantization_config"),
    read_layers=read_layers,
    defaults={_BIAS: True, PARTIAL_ROTARY: 0.5},  # transformers' own (Glm4Config, 5.19)
)
