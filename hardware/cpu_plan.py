"""How the CPU attends: one SDPA call per group of sequences of like length, never a mask over a whole pack."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hardware.masks import MaskSpec, slot_places, zigzag_positions
from hardware.platform import AttentionInputs
from hardware.rules import CAUSAL, Rule


@dataclass(frozen=True)
class Group:
    """Sequences that one SDPA call attends: ``rows`` sequences of ``queries`` slots, each seeing ``keys`` slots.

    ``masks`` maps a rule to the ``[rows or 1, 1, queries, keys]`` bool mask (True = may see); None in its place means
    that the kernel's own causal rule says the same.
    """

    rows: int
    queries: int
    keys: int
    masks: dict[Rule, Tensor | None]


@dataclass(frozen=True)
class CpuPlan:
    """Index tensors that bring packed slots into groups and back.

    Attributes:
        query_index: ``[sum(rows * queries)]`` slots in group order, or None where slots already lie so.
        key_index: ``[sum(rows * keys)]`` into the keys gathered over context-parallel ranks (bshd: ``[s * cp]``, the
            order of positions), or None.
        slot_row: ``[s]`` where each slot's output lies in group order, or None. Slots of a sequence without tokens
            are in no group and share the first row.
    """

    groups: tuple[Group, ...]
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    slot_row: Tensor | None = None


def attention_inputs(spec: MaskSpec, rotary: tuple[Tensor, Tensor]) -> AttentionInputs:
    """``CpuPlatform.attention_inputs``, for rules that the capability table lets through."""
    plan = _plan_bshd(spec) if spec.kind == "bshd" else _plan_thd(spec)
    if spec.kind == "bshd":
        rotary = tuple(x.transpose(0, 1).unsqueeze(2) for x in rotary)  # [b, s, d] -> [s, b, 1, d]
    else:
        rotary = tuple(x[0].unsqueeze(1) for x in rotary)  # [1, s, d] -> [s, 1, d]
    return AttentionInputs("sbhd" if spec.kind == "bshd" else "thd", spec, rotary, plan)


def _group(spec: MaskSpec, members: np.ndarray, keys: int) -> Group:
    """The group of these sequences, each of ``keys`` slots over all context-parallel ranks."""
    query = zigzag_positions(keys, spec.cp, spec.cp_rank)
    return Group(
        len(members), len(query), keys, {rule: _mask(spec, rule, members, query, keys) for rule in set(spec.rules)}
    )


def _mask(spec: MaskSpec, rule: Rule, members: np.ndarray, query: np.ndarray, keys: int) -> Tensor | None:
    """What a rule lets queries at positions ``query`` see of keys at positions ``0..keys-1``, for each sequence.

    Right padding needs no bit of its own where the rule is causal: it lies after every real token of its sequence.
    """
    key = np.arange(keys)
    image, prefix = np.full((1, 1, 1, 1), -1), np.zeros((1, 1, 1, 1), np.int64)
    if rule.images:
        image = spec.images_at(members[:, None], key)[:, None, None, :]  # [rows, 1, 1, k]
    if rule.prefix:
        prefix = np.asarray(spec.prefixes)[members, None, None, None]
    # What changes nothing here is left out, so that a group without pictures takes the kernel's own causal rule.
    rule = replace(
        rule,
        window=None if rule.window is None or rule.window >= keys else rule.window,
        chunk=None if rule.chunk is None or rule.chunk >= keys else rule.chunk,
        images=bool((image >= 0).any()),
        prefix=bool((prefix > 1).any()),
    )
    if rule == CAUSAL and spec.cp == 1:
        return None
    own = image[..., query].swapaxes(2, 3) if rule.images else image  # [rows, 1, q, 1]
    query = query[:, None]
    see = rule.allows(query - key, (own == image) & (own >= 0), (query < prefix) & (key < prefix), query, key)
    if not rule.causal:
        lengths = np.asarray(spec.lengths)[members, None, None, None]
        see = see & (key < np.maximum(lengths, 1))  # a row without any key would be 0 / 0
    return torch.from_numpy(see if see.ndim == 4 else see[None, None])


def _plan_bshd(spec: MaskSpec) -> CpuPlan:
    length = spec.padded[0]
    group = _group(spec, np.arange(len(spec.padded)), length)
    if spec.cp == 1:
        return CpuPlan((group,))
    order = np.argsort(np.concatenate([zigzag_positions(length, spec.cp, rank) for rank in range(spec.cp)]))
    return CpuPlan((group,), key_index=torch.from_numpy(order))


def _bucket(length: int, spec: MaskSpec) -> int:
    """Group length for a sequence: eight buckets an octave waste at most an eighth; exact where positions are cut."""
    if spec.cp > 1:
        return length
    step = max(1, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


def _plan_thd(spec: MaskSpec) -> CpuPlan:
    padded = np.asarray(spec.padded, dtype=np.int64)
    local = padded // spec.cp
    start = np.cumsum(local) - local
    slots = int(local.sum())
    # A sequence without tokens is all padding, and may be long: the rest of a pack of a fixed size.
    buckets = np.asarray([_bucket(n, spec) if length else 0 for n, length in zip(spec.padded, spec.lengths)])
    groups, query_index, key_index, slot_row, base = [], [], [], np.zeros(slots, np.int64), 0
    for keys in sorted(set(buckets.tolist()) - {0}):
        members = np.flatnonzero(buckets == keys)
        width = keys // spec.cp
        # A sequence shorter than its bucket repeats its last slot; its masks keep the copies out of sight.
        within = np.minimum(np.arange(width), local[members, None] - 1)
        queries = start[members, None] + within
        own = np.arange(width) < local[members, None]
        slot_row[queries[own]] = base + np.arange(own.size).reshape(own.shape)[own]
        query_index.append(queries.ravel())
        key_index.append(_key_slots(spec, start[members], keys, slots).ravel() if spec.cp > 1 else queries.ravel())
        groups.append(_group(spec, members, keys))
        base += own.size
    flat = np.concatenate(query_index)
    if spec.cp == 1 and np.array_equal(flat, np.arange(slots)):
        return CpuPlan(tuple(groups))
    tensors = (torch.from_numpy(x) for x in (flat, np.concatenate(key_index), slot_row))
    return CpuPlan(tuple(groups), *tensors)


def _key_slots(spec: MaskSpec, start: np.ndarray, keys: int, slots: int) -> np.ndarray:
    """Where positions ``0..keys-1`` of each sequence lie in the keys gathered over ranks: ``[members, keys]``."""
    rank_of, within = np.empty(keys, np.int64), np.empty(keys, np.int64)
    for rank in range(spec.cp):
        _, position = slot_places((keys,), spec.cp, rank)
        rank_of[position], within[position] = rank, np.arange(len(position))
    return rank_of * slots + start[:, None] + within
