"""Qwen3.5, text alone: gated delta nets (arXiv:2412.06464) on most layers, gated attention on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models.families._partial_rotary import PARTIAL_ROTARY, read_partial_rope
from engines.models.families._pieces import attention, embedding, final_norm, group_queries, mlp, qk_norm
from engines.models.family import Family
from engines.models.hf_config import NEEDED
from engines.models.joins import Grouped, Shape
from engines.models.layer import DecoderSizes, LayerKind
from engines.models.weight import Weight
from engines.validation import fits
from hardware.attention.rules import CAUSAL, MOST_TAPS, Rule
from hardware.megatron.form import LayerOptions
from hardware.megatron.states.mixer import DeltaNet

if TYPE_CHECKING:  # joins are stated before anything takes the time to import torch
    from torch import Tensor

_KINDS = ("full_attention", "linear_attention")
_COUNTS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_TAPS, _INTERVAL = "linear_conv_kernel_dim", "full_attention_interval"
_GATES = {"attn_output_gate": (True,), "output_gate_type": ("silu", "swish")}
"""Settings of gates that vLLM reads and transformers (5.19) does not -> values that transformers computes by."""


@dataclass(frozen=True)
class GatedQueries(Grouped):
    """Groups queries, keys and values, where each head's query has a gate below it: a group has its queries above
    their gates.

    Attributes:
        head_dim: rows of a head's query.
    """

    head_dim: int = 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        query, *others = tensors
        query = query.unflatten(0, (self.groups, -1, 2, self.head_dim)).transpose(1, 2).flatten(0, 3)
        return super().join([query, *others])

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        query, *others = super().split(whole, shapes)
        query = query.unflatten(0, (self.groups, 2, -1, self.head_dim)).transpose(1, 2)
        return [query.flatten(0, 3), *others]


def gated_attention(model: DecoderSizes) -> tuple[Weight, ...]:
    """State attention of which each head's query has a gate of the output beside it, and the norm before it."""
    norm, output, qkv = attention(model)
    (query, (rows, hidden)), *others = qkv.tensors.items()
    by_groups = group_queries(model)
    # A head of a folder's query has two runs of rows: the query, and its gate.
    runs = (2 * rows, *by_groups.runs[1:])
    join = GatedQueries(groups=by_groups.groups, runs=runs, head_dim=model.head_dim)
    return norm, output, replace(qkv, tensors={query: (2 * rows, hidden), **dict(others)}, join=join)


@dataclass(frozen=True)
class DeltaMixer:
    """States a gated delta net, and the norm before it; a ``Piece``.

    Attributes:
        is_fused: a folder has the projections as two tensors, of one key head after another: its query, itself, its
            values and the gate of its output; both gates of its value heads. Else a tensor of each, of all heads.
    """

    net: DeltaNet
    is_fused: bool = False

    def __call__(self, model: DecoderSizes) -> tuple[Weight, ...]:
        net = self.net
        heads = net.key_heads * net.ratio
        keys, values = net.key_heads * net.key_dim, heads * net.value_dim
        mixed, groups, name = 2 * keys + values, net.key_heads, "self_attention.in_proj.weight"
        if self.is_fused:
            projections = {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * heads}
            runs, order = (keys, keys, values, values, heads, heads), (0, 1, 2, 5, 4, 3)
        else:
            projections = {"in_proj_qkv": mixed, "in_proj_a": heads, "in_proj_b": heads, "in_proj_z": values}
            runs, order = (keys, keys, values, heads, heads, values), ()
        columns = {f"linear_attn.{name}.weight": (rows, model.hidden) for name, rows in projections.items()}
        conv = {"linear_attn.conv1d.weight": (mixed, 1, net.taps)}
        return (
            Weight("input_layernorm.weight", {"input_layernorm.weight": (model.hidden,)}),
            Weight("self_attention.conv", conv, Grouped(groups=groups, runs=(keys, keys, values)), {0: "tp"}),
            Weight("self_attention.a_log", {"linear_attn.A_log": (heads,)}, cut={0: "tp"}),
            Weight("self_attention.dt_bias", {"linear_attn.dt_bias": (heads,)}, cut={0: "tp"}),
            Weight("self_attention.out_norm", {"linear_attn.norm.weight": (net.value_dim,)}),
            Weight(name, columns, Grouped(groups=groups, runs=runs, order=order), {0: "tp"}),
            Weight(
                "self_attention.out_proj.weight", {"linear_attn.out_proj.weight": (model.hidden, values)}, cut={1: "tp"}
            ),
        )


def read_layers(config: dict, path: Path, layer: LayerKind, is_fused: bool = False) -> tuple[LayerKind, ...]:
    """Read the kind of each layer: a state, or attention over the whole past.

    Args:
        is_fused: as of ``DeltaMixer``.

    Raises:
        ValueError: ``layer_types`` are not as many as layers or have no attention, a gate is of another kind, heads do
            not fit each other, a convolution has more taps than are computed, or a rotary embedding is not built.
    """
    layers, every = config["num_hidden_layers"], config[_INTERVAL]
    if not fits(int, every) or every < 1:
        raise ValueError(f"model: {path} has {_INTERVAL} {every!r}, expected a whole number of at least 1")
    kinds = config.get("layer_types") or [_KINDS[(i + 1) % every != 0] for i in range(layers)]
    for key, built in _GATES.items():
        if config.get(key, built[0]) not in built:
            expected = " or ".join(map(repr, built))
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected {expected}, as transformers computes")
    if len(kinds) != layers:
        raise ValueError(f"model: {path} has {len(kinds)} layer_types, expected one for each of its {layers} layers")
    if _KINDS[0] not in kinds:  # the check of masks, and that of vLLM's parts, need a layer of attention
        raise ValueError(f"model: {path} has layer_types of {_KINDS[1]} alone, expected {_KINDS[0]} among them")
    full = replace(layer, rope=read_partial_rope(config, path))
    net = read_delta_net(config, path)
    linear = replace(
        full,
        mixer=(DeltaMixer(net, is_fused),),
        rule=Rule(state=True),
        options=replace(full.options, gates_output=False, mixer=net),
    )
    return tuple(linear if kind == _KINDS[1] else full for kind in kinds)


def read_delta_net(config: dict, path: Path) -> DeltaNet:
    """Read the sizes of the layers with a state; ValueError for numbers that do not fit."""
    for key in (*_COUNTS, _TAPS):
        if not fits(int, config[key]) or config[key] < 1:
            raise ValueError(f"model: {path} has {key} {config[key]!r}, expected a whole number of at least 1")
    key_heads, value_heads, key_dim, value_dim = (config[key] for key in _COUNTS)
    if value_heads % key_heads:
        raise ValueError(
            f"model: {path} has {_COUNTS[1]} {value_heads}, expected a multiple of its {key_heads} {_COUNTS[0]}: value "
            "heads share key heads"
        )
    if config[_TAPS] > MOST_TAPS:
        raise ValueError(f"model: {path} has {_TAPS} {config[_TAPS]}, expected at most {MOST_TAPS}")
    return DeltaNet(key_heads, value_heads // key_heads, key_dim, value_dim, config[_TAPS])


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    before=(embedding,),
    layer=LayerKind(
        (gated_attention, qk_norm), (mlp,), CAUSAL, options=LayerOptions(norms_from_one=True, gates_output=True)
    ),
    after=(final_norm,),
    needed=(*NEEDED, "num_key_value_heads", "head_dim", *_COUNTS),
    refused=("attention_bias", "mlp_bias", "sliding_window", "quantization_config"),
    read_layers=read_layers,
    # transformers' own, where a config leaves them out (Qwen3_5TextConfig, 5.19)
    defaults={_TAPS: 4, _INTERVAL: 4, PARTIAL_ROTARY: 0.25},
    layer_types=_KINDS,
    kept=("mtp.",),  # layers that predict further tokens; transformers and vLLM's policy leave them out
)
