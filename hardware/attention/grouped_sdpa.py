"""Attention by torch's SDPA on any device: one call per group of sequences of similar length.

So no mask ever covers a whole pack.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hardware.attention.dense.mask import build_dense_mask
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, list_zigzag_positions, locate_gathered_keys
from hardware.attention.rules import Rule
from hardware.transfer import to_device

if TYPE_CHECKING:  # models without states load nothing of them
    from hardware.attention.delta_rule import DeltaPlan


@dataclass(frozen=True)
class Group:
    """Sequences that one SDPA call attends.

    Attributes:
        rows: number of sequences. queries, keys: number of query slots and of key slots of each.
        masks: rule -> ``[rows or 1, 1, queries, keys]`` mask that is added to scores, 0 or minus infinity; None if the
            kernel's own causal mask is the same.
    """

    rows: int
    queries: int
    keys: int
    masks: dict[Rule, Tensor | None]


@dataclass(frozen=True)
class GroupedPlan:
    """Index tensors that bring packed slots into groups and back.

    Attributes:
        groups: the groups.
        query_index: ``[sum(rows * queries)]``, slots in the order of the groups; None if slots are in that order
            already.
        key_index: ``[sum(rows * keys)]``, index into the keys gathered over context-parallel ranks (bshd: ``[s * cp]``,
            the order of positions); None as for queries.
        slot_row: ``[s]``, index of each slot's output in the order of the groups; None as for queries. Slots of a
            sequence without tokens are in no group and share the first row.
    """

    groups: tuple[Group, ...]
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    slot_row: Tensor | None = None


def build_attention_inputs(
    spec: MaskSpec, rotary: tuple[Tensor, Tensor], delta: "DeltaPlan | None" = None
) -> AttentionInputs:
    """Build the inputs of ``attend_groups``, for rules that the capability table accepts.

    Args:
        delta: as in ``AttentionInputs.build``.
    """
    plan = _plan_bshd if spec.kind == "bshd" else _plan_thd
    return AttentionInputs.build(spec, rotary, plan(spec, rotary[0]), delta)


def _group(spec: MaskSpec, members: np.ndarray, own: int, like: Tensor, begin: int = 0) -> Group:
    """The group of these sequences, each of ``own`` slots over all context-parallel ranks behind ``begin`` tokens; its
    masks have the type and the device of ``like``."""
    query, keys = begin + list_zigzag_positions(own, spec.cp, spec.cp_rank), begin + own
    masks = {rule: build_dense_mask(spec, rule, members, query, keys) for rule in spec.attended}
    # As biases: of a bool mask SDPA would make one in every layer, and keep each for the backward pass.
    for rule, mask in masks.items():
        if mask is not None:
            masks[rule] = like.new_zeros(mask.shape).masked_fill_(~to_device(mask, like.device), -torch.inf)
    return Group(len(members), len(query), keys, masks)


def _plan_bshd(spec: MaskSpec, like: Tensor) -> GroupedPlan:
    length = spec.padded[0]
    group = _group(spec, np.arange(len(spec.padded)), length, like)
    if spec.cp == 1:
        return GroupedPlan((group,))
    chunk = length // (2 * spec.cp)
    key_index = locate_gathered_keys(spec.cp, np.zeros(1, np.int64), chunk, np.arange(length), 2 * chunk)
    return GroupedPlan((group,), key_index=to_device(key_index, like.device))


def _bucket(length: int, spec: MaskSpec) -> int:
    """Round a length up to its bucket: eight buckets an octave waste at most an eighth of the slots.

    Under context parallelism lengths stay exact, since rounding would move the chunks.
    """
    if spec.cp > 1:
        return length
    step = max(1, 2 ** (length.bit_length() - 4))  # a length is 8 to 15 whole steps
    return -(-length // step) * step


def _plan_thd(spec: MaskSpec, like: Tensor) -> GroupedPlan:
    padded = np.asarray(spec.padded, dtype=np.int64)
    local = padded // spec.cp  # [B]: slots of each sequence on a rank
    start = np.cumsum(local) - local  # [B]: first slot of each sequence on a rank
    slots = int(local.sum())
    # A sequence without tokens is all padding, and may be long: the rest of a pack of a fixed size.
    buckets = np.asarray([_bucket(n, spec) if length and n else 0 for n, length in zip(spec.padded, spec.lengths)])
    groups, query_index, keys, slot_row, base = [], [], [], np.zeros(slots, np.int64), 0
    for bucket, begin in sorted({pair for pair in zip(buckets.tolist(), spec.begins.tolist()) if pair[0]}):
        members = np.flatnonzero((buckets == bucket) & (spec.begins == begin))
        size = int(padded[members].max())
        width = size // spec.cp
        # A sequence shorter than the longest repeats its last slot; its masks keep the copies out of sight.
        within = np.minimum(np.arange(width), local[members, None] - 1)  # [rows, width]
        queries = start[members, None] + within  # [rows, width]: the slot of each query
        own = np.arange(width) < local[members, None]  # [rows, width] bool: not a copy
        # The output of a slot is its row among all groups end to end; copies are left out.
        slot_row[queries[own]] = base + np.arange(own.size).reshape(own.shape)[own]
        query_index.append(queries.ravel())
        position = np.minimum(np.arange(begin + size), begin + padded[members, None] - 1)  # [rows, begin + size]
        keys.append((np.repeat(members, begin + size), position.ravel()))
        groups.append(_group(spec, members, size, like, begin))
        base += own.size
    flat = np.concatenate(query_index)
    if spec.cp == 1 and not spec.sharing and np.array_equal(flat, np.arange(slots)):
        return GroupedPlan(tuple(groups))
    key_index = spec.locate_keys(*(np.concatenate(column) for column in zip(*keys)))
    tensors = (to_device(x, like.device) for x in (flat, key_index, slot_row))
    return GroupedPlan(tuple(groups), *tensors)


def attend_groups(query: Tensor, key: Tensor, value: Tensor, plan: GroupedPlan, rule: Rule, scale: float) -> Tensor:
    """Compute core attention with a plan from ``build_attention_inputs``.

    Args:
        query: ``[s, b, h, d]``, or ``[slots, h, d]`` for a pack.
        key, value: the same, for all context-parallel ranks.
        scale: factor of the scores.

    Returns:
        ``[s, b, h * d]``, or ``[slots, h * d]``.
    """
    attend = _attend_bshd if query.dim() == 4 else _attend_thd
    return attend(query, key, value, plan, rule, scale)


def _attend_bshd(query: Tensor, key: Tensor, value: Tensor, plan: GroupedPlan, rule: Rule, scale: float) -> Tensor:
    if plan.key_index is not None:
        key, value = (x.index_select(0, plan.key_index) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, h, s, d]
    out = _sdpa(query, key, value, plan.groups[0].masks[rule], scale)
    return out.permute(2, 0, 1, 3).flatten(2)


def _attend_thd(query: Tensor, key: Tensor, value: Tensor, plan: GroupedPlan, rule: Rule, scale: float) -> Tensor:
    query_sizes = [g.rows * g.queries for g in plan.groups]
    key_sizes = [g.rows * g.keys for g in plan.groups]
    if plan.query_index is not None and plan.key_index is not None:
        queries = _Gather.apply(query, plan.query_index, query_sizes)
        keys, values = (_Gather.apply(x, plan.key_index, key_sizes) for x in (key, value))
    else:
        queries, keys, values = query.split(query_sizes), key.split(key_sizes), value.split(key_sizes)
    outs = []
    for group, q, k, v in zip(plan.groups, queries, keys, values, strict=True):
        q, k, v = (x.view(group.rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # [rows, h, len, d]
        outs.append(_sdpa(q, k, v, group.masks[rule], scale).transpose(1, 2).reshape(len(q) * group.queries, -1))
    out = torch.cat(outs)
    return out if plan.slot_row is None else out.index_select(0, plan.slot_row)


class _Gather(torch.autograd.Function):
    """The rows of each group: ``x.index_select(0, index).split(sizes)``, with its gradient to the last bit.

    Each group's gradient is added to the rows that it has. Autograd would join the gradients of all groups first, which
    are as many rows as sequences have tokens.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.sizes, ctx.shape = sizes, x.shape
        return tuple(x.index_select(0, part) for part in index.split(sizes))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        total = gradients[0].new_zeros(ctx.shape)
        for part, gradient in zip(index.split(ctx.sizes), gradients, strict=True):
            total.index_add_(0, part, gradient)
        return total, None, None


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    ratio = query.shape[1] // key.shape[1]
    if ratio > 1 and query.is_cuda:
        # CUDA's kernel for float32 does not take fewer key heads; torch would form all scores, [b, h, s, s], in memory.
        key, value = (x.repeat_interleave(ratio, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
