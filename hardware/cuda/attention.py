"""Core attention of the CUDA platforms: ``varlen_attn``, with explicit lengths, window and scale at every call."""

import inspect
from typing import Any, cast

from torch import Tensor
from torch.nn.attention import varlen

from hardware.attention.grouped_sdpa import GroupedPlan, attend_groups
from hardware.attention.rules import Rule
from hardware.cuda.attention_plan import RuleCalls, VarlenCall, VarlenPlan
from hardware.megatron import layers
from hardware.megatron.layers import CoreAttention

_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether ``varlen_attn`` has the argument enable_gqa; torch 2.11 lacks it and takes fewer key heads without it."""


class CudaAttention(CoreAttention):
    """Core attention by one call of ``varlen_attn`` for a micro-batch, or two where tokens see the future.

    It uses grouped SDPA if the plan is a ``hardware.attention.grouped_sdpa.GroupedPlan``.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan | GroupedPlan, rule: Rule) -> Tensor:
        if isinstance(plan, GroupedPlan):
            return attend_groups(query, key, value, plan, rule, self.softmax_scale)
        if query.dim() == 3:
            return self._attend_pack(query, key, value, plan.calls[rule]).flatten(1)
        slots, rows = query.shape[:2]
        # [cp * s, b, h, d] -> [cp * b * s, h, d]: of each rank one row after another.
        query, key, value = (x.unflatten(0, (-1, slots)).transpose(1, 2).flatten(0, 2) for x in (query, key, value))
        out = self._attend_pack(query, key, value, plan.calls[rule]).flatten(1)
        return out.unflatten(0, (rows, slots)).transpose(0, 1).contiguous()

    def _attend_pack(self, query: Tensor, key: Tensor, value: Tensor, calls: RuleCalls) -> Tensor:
        out = self._call(query, key, value, calls.base)
        if calls.opened is None or calls.slots is None:
            return out
        opened = self._call(query, key, value, calls.opened)
        return out.index_copy(0, calls.slots, opened if calls.rows is None else opened.index_select(0, calls.rows))

    def _call(self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall) -> Tensor:
        if call.query_index is not None:
            query = query.index_select(0, call.query_index)
        if call.key_index is not None:
            key, value = (x.index_select(0, call.key_index) for x in (key, value))
        grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _ASKS_FOR_GROUPS else {}
        out = varlen.varlen_attn(
            query,
            key,
            value,
            call.cu_seq_q,
            call.cu_seq_k,
            call.max_q,
            call.max_k,
            scale=self.softmax_scale,
            window_size=call.window_size,
            **grouped,
        )
        return cast(Tensor, out)  # a pair where lse is asked for, too


def build_layer_spec(config, options) -> Any:
    """Build the layers of a stage, as ``Platform.build_layer_spec`` says."""
    return layers.build_layer_spec(config, options, CudaAttention)
