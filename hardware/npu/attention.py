"""Core attention of the NPU platforms: ``npu_fusion_attention``, with explicit mask and scale at every call."""

from typing import Any

import torch
from torch import Tensor

from hardware.attention.rules import Rule
from hardware.megatron import layers
from hardware.megatron.layers import CoreAttention
from hardware.npu.attention_plan import KernelCall, NpuPlan
from hardware.npu.experts import NpuGroupedExperts
from hardware.npu.layers import NpuRMSNorm, find_mlp, rotate_fused


class NpuAttention(CoreAttention):
    """Core attention by one call of ``npu_fusion_attention`` for a micro-batch, or two under context parallelism."""

    def rotate(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return super().rotate(x, rotary) if self.scales_rotary else rotate_fused(x, rotary)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: NpuPlan, rule: Rule) -> Tensor:
        outs = [self._call(query, key, value, call) for call in plan.calls[rule]]
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return out if plan.slot_row is None else out.index_select(0, plan.slot_row)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> Tensor:
        if call.query_index is not None:
            query = query.index_select(0, call.query_index)
        if call.key_index is not None:
            key, value = (x.index_select(0, call.key_index) for x in (key, value))
        heads, packed = query.shape[-2], query.dim() == 3
        if not packed:  # [s, b, h, d] -> [s, b, h * d]
            query, key, value = (x.flatten(2) for x in (query, key, value))
        out = torch.ops.npu.npu_fusion_attention(
            query,
            key,
            value,
            heads,
            "TND" if packed else "SBH",
            atten_mask=call.atten_mask,
            scale=self.softmax_scale,
            pre_tockens=call.pre_tockens,
            next_tockens=call.next_tockens,
            actual_seq_qlen=call.actual_seq_qlen,
            actual_seq_kvlen=call.actual_seq_kvlen,
            sparse_mode=call.sparse_mode,
        )[0]
        return out.flatten(1) if packed else out


def build_layer_spec(config, options) -> Any:
    """Build the layers of a stage, as ``Platform.build_layer_spec`` says."""
    return layers.build_layer_spec(config, options, NpuAttention, NpuRMSNorm, find_mlp(config), NpuGroupedExperts)
