"""Core attention of the CPU platform: torch's SDPA over groups of sequences of like length."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hardware.attention.rules import Rule
from hardware.cpu.attention_plan import CpuPlan
from hardware.megatron.layers import CoreAttention


class CpuAttention(CoreAttention):
    """One SDPA call for a batch of rows, or for each group of a pack."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: CpuPlan, rule: Rule) -> Tensor:
        return attend_groups(query, key, value, plan, rule, self.softmax_scale)


def attend_groups(query: Tensor, key: Tensor, value: Tensor, plan: CpuPlan, rule: Rule, scale: float) -> Tensor:
    """Attend by a plan of this platform, as ``CoreAttention.attend``, on any device."""
    attend = _attend_bshd if query.dim() == 4 else _attend_thd
    return attend(query, key, value, plan, rule, scale)


def _attend_bshd(query: Tensor, key: Tensor, value: Tensor, plan: CpuPlan, rule: Rule, scale: float) -> Tensor:
    if plan.key_index is not None:
        key, value = (x.index_select(0, plan.key_index) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, h, s, d]
    out = _sdpa(query, key, value, plan.groups[0].masks[rule], scale)
    return out.permute(2, 0, 1, 3).flatten(2)


def _attend_thd(query: Tensor, key: Tensor, value: Tensor, plan: CpuPlan, rule: Rule, scale: float) -> Tensor:
    if plan.query_index is not None and plan.key_index is not None:
        query = query.index_select(0, plan.query_index)
        key, value = (x.index_select(0, plan.key_index) for x in (key, value))
    query_sizes = [g.rows * g.queries for g in plan.groups]
    key_sizes = [g.rows * g.keys for g in plan.groups]
    outs = []
    for group, q, k, v in zip(
        plan.groups, query.split(query_sizes), key.split(key_sizes), value.split(key_sizes), strict=True
    ):
        q, k, v = (x.unflatten(0, (group.rows, -1)).transpose(1, 2) for x in (q, k, v))  # [rows, h, len, d]
        outs.append(_sdpa(q, k, v, group.masks[rule], scale).transpose(1, 2).flatten(0, 1).flatten(1))
    out = torch.cat(outs)
    return out if plan.slot_row is None else out.index_select(0, plan.slot_row)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
