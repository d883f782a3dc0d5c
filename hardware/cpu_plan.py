"""How the CPU attends: one SDPA call per group of sequences of like length, never a mask over a whole pack."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hardware.masks import MaskSpec, slot_places, zigzag_positions
from hardware.platform import AttentionInputs


@dataclass(frozen=True)
class Group:
    """Sequences that one SDPA call attends: ``rows`` sequences of ``queries`` slots, each seeing ``keys`` slots.

    ``masks`` maps a window to the ``[rows or 1, 1, queries, keys]`` bool mask (True = may see); None in its place means
    that the kernel's own causal rule says the same.
    """

    rows: int
    queries: int
    keys: int
    masks: dict[int | None, Tensor | None]


@dataclass(frozen=True)
class CpuPlan:
    """Index tensors that bring packed slots into groups and back.

    Attributes:
        query_index: ``[sum(rows * queries)]`` slots in group order, or None where slots already lie so.
        key_index: ``[sum(rows * keys)]`` into the keys gathered over context-parallel ranks (bshd: ``[s * cp]``, the
            order of positions), or None.
        slot_row: ``[s]`` where each slot's output lies in group order, or None.
    """

    groups: tuple[Group, ...]
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    slot_row: Tensor | None = None


def attention_inputs(spec: MaskSpec, rotary: tuple[Tensor, Tensor]) -> AttentionInputs:
    """``CpuPlatform.attention_inputs``."""
    plan = _plan_bshd(spec) if spec.kind == "bshd" else _plan_thd(spec)
    if spec.kind == "bshd":
        rotary = tuple(x.transpose(0, 1).unsqueeze(2) for x in rotary)  # [b, s, d] -> [s, b, 1, d]
    else:
        rotary = tuple(x[0].unsqueeze(1) for x in rotary)  # [1, s, d] -> [s, 1, d]
    return AttentionInputs("sbhd" if spec.kind == "bshd" else "thd", spec, rotary, plan)


def _masks(spec: MaskSpec, query_position: np.ndarray, keys: int, is_prefix: bool) -> dict[int | None, Tensor | None]:
    """A mask per distinct window for queries ``[rows or 1, q]`` against keys at positions ``0..keys-1``.

    Right padding needs no bit of its own: it lies after every real token of its sequence, so the causal rule hides it.
    """
    distance = torch.from_numpy(query_position[:, None, :, None] - np.arange(keys))  # [rows or 1, 1, q, k]
    masks: dict[int | None, Tensor | None] = {}
    for window in set(spec.windows):
        wide = window is None or window >= keys
        masks[window] = None if wide and is_prefix else (distance >= 0) & (distance < (keys if wide else window))
    return masks


def _plan_bshd(spec: MaskSpec) -> CpuPlan:
    rows, length = len(spec.padded), spec.padded[0]
    position = zigzag_positions(length, spec.cp, spec.cp_rank)
    group = Group(rows, len(position), length, _masks(spec, position[None], length, spec.cp == 1))
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
    buckets = np.asarray([_bucket(int(n), spec) for n in spec.padded])
    groups, query_index, key_index, slot_row, base = [], [], [], np.zeros(slots, np.int64), 0
    for keys in sorted(set(buckets.tolist()) - {0}):
        members = np.flatnonzero(buckets == keys)
        width = keys // spec.cp
        # A sequence shorter than its bucket repeats its last slot; the causal rule keeps the copies out of sight.
        within = np.minimum(np.arange(width), local[members, None] - 1)
        queries = start[members, None] + within
        own = np.arange(width) < local[members, None]
        slot_row[queries[own]] = base + np.arange(own.size).reshape(own.shape)[own]
        query_index.append(queries.ravel())
        key_index.append(_key_slots(spec, start[members], keys, slots).ravel() if spec.cp > 1 else queries.ravel())
        position = zigzag_positions(keys, spec.cp, spec.cp_rank)[None]
        groups.append(Group(len(members), width, keys, _masks(spec, position, keys, spec.cp == 1)))
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
