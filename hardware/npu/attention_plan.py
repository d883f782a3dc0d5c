"""The NPU's attention plan: each rule as calls of ``npu_fusion_attention``, built once for all layers."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hardware.attention.capabilities import find_backend
from hardware.attention.dense.mask import build_dense_mask
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, expand_counts, list_zigzag_positions, locate_gathered_keys
from hardware.attention.rules import CAUSAL, Rule, count_tokens_before
from hardware.npu.kernel_call import NO_LIMIT, build_triangle
from hardware.npu.limits import MAX_PACK_SEQUENCES
from hardware.platform import Platform


@dataclass(frozen=True)
class KernelCall:
    """One call of ``npu_fusion_attention``.

    Attributes:
        atten_mask, ..., actual_seq_kvlen: the kernel's keywords of the same names.
        query_index: ``[q]``, the slots whose queries are passed; None passes all.
        key_index: ``[k]``, index into the keys gathered over the context-parallel ranks; None passes all.
    """

    atten_mask: Tensor | None
    sparse_mode: int
    pre_tockens: int = NO_LIMIT
    next_tockens: int = NO_LIMIT
    actual_seq_qlen: list[int] | None = None
    actual_seq_kvlen: list[int] | None = None
    query_index: Tensor | None = None
    key_index: Tensor | None = None


@dataclass(frozen=True)
class NpuPlan:
    """The calls of every rule. Their outputs end to end are the slots', reordered by ``slot_row`` ``[s]`` if given."""

    calls: dict[Rule, tuple[KernelCall, ...]]
    slot_row: Tensor | None = None


@cache
def _triangle(device: torch.device) -> Tensor:
    return build_triangle(device)


def lower(
    platform: Platform, spec: MaskSpec, rotary: tuple[Tensor, Tensor], override: tuple[str, ...]
) -> AttentionInputs:
    """Lower a mask by the mode that the capability table names for each rule, as ``Platform.build_attention_inputs``
    says."""
    backends = platform.attention_backends
    found = {rule: find_backend(backends, spec.kind, spec.cp, rule, override)[0] for rule in spec.rules}
    return build_attention_inputs(spec, rotary, {rule: int(found[rule][-1]) for rule in spec.attended})


def build_attention_inputs(spec: MaskSpec, rotary: tuple[Tensor, Tensor], modes: dict[Rule, int]) -> AttentionInputs:
    """Build the inputs of the NPU's core attention, for rules that the capability table accepts.

    Args:
        modes: rule -> ``sparse_mode`` that the table names for it.

    Raises:
        ValueError: the pack has more sequences than the kernel takes.
    """
    device = rotary[0].device
    if spec.kind == "bshd":
        return AttentionInputs.build(spec, rotary, _plan_bshd(spec, modes, device))
    if len(spec.padded) > MAX_PACK_SEQUENCES:
        raise ValueError(
            f"attention: an NPU takes at most {MAX_PACK_SEQUENCES} sequences in a pack, got {len(spec.padded)}; lower "
            "--actor.micro-batch-tokens"
        )
    as_they_lie = spec.cp == 1 and not spec.sharing
    plan = _plan_thd(spec, modes, device) if as_they_lie else _plan_indexed(spec, modes, device)
    return AttentionInputs.build(spec, rotary, plan)


def _compressed(rule: Rule, mode: int, device: torch.device) -> KernelCall:
    """Make a call with the kernel's compressed mask: ``sparse_mode`` 2 causal aligned at the first key, 3 causal
    aligned at the last key, 4 a window."""
    if mode == 4:
        return KernelCall(_triangle(device), mode, count_tokens_before(rule.window), next_tockens=0)
    return KernelCall(_triangle(device), mode)


def _plan_bshd(spec: MaskSpec, modes: dict[Rule, int], device: torch.device) -> NpuPlan:
    length, rows = spec.padded[0], np.arange(len(spec.padded))
    order = None if spec.cp == 1 else _positions(spec, device)
    chunks, calls = _chunks_bshd(spec, order, device), {}
    for rule, mode in modes.items():
        if mode == 1:
            mask = build_dense_mask(spec, rule, rows, list_zigzag_positions(length, spec.cp, spec.cp_rank), length)
            if mask is None:  # no row needs more than causal
                calls[rule] = (_compressed(CAUSAL, 2, device),)
            else:
                calls[rule] = (KernelCall(~mask.to(device), 1, key_index=order),)
        else:
            call = _compressed(rule, mode, device)
            calls[rule] = tuple(replace(call, query_index=query, key_index=key) for query, key in chunks)
    return NpuPlan(calls)


def _positions(spec: MaskSpec, device: torch.device) -> Tensor:
    """Locate the key of each position of a row, ``[length]``, among the keys gathered over the context-parallel
    ranks."""
    # Gathered keys lie rank after rank, each with its low and its high chunk: position order is a permutation of them.
    chunk = spec.padded[0] // (2 * spec.cp)
    keys = locate_gathered_keys(spec.cp, np.zeros(1, np.int64), chunk, np.arange(spec.padded[0]), 2 * chunk)
    return torch.from_numpy(keys).to(device)


def _chunks_bshd(
    spec: MaskSpec, order: Tensor | None, device: torch.device
) -> list[tuple[Tensor | None, Tensor | None]]:
    """List ``(query_index, key_index)`` of each call: the low and the high chunk of a rank, each with all keys up to
    the chunk's end, so that the kernel's causal mask aligned at the last key is right."""
    if order is None:
        return [(None, None)]
    chunk = spec.padded[0] // (2 * spec.cp)  # slots of a chunk; a rank holds two, low then high
    slots = torch.arange(2 * chunk, device=device)
    return [
        (slots[half * chunk : (half + 1) * chunk], order[: chunk * end]) for half, end in enumerate(_count_chunks(spec))
    ]


def _count_chunks(spec: MaskSpec) -> tuple[int, int]:
    """Count the chunks of a sequence up to the end of the rank's low chunk, and of its high chunk (zigzag)."""
    # Rank r holds chunks r and 2 cp - 1 - r.
    return spec.cp_rank + 1, 2 * spec.cp - spec.cp_rank


def _cut_pieces(sizes: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut sequences of these sizes as the kernel is told them: ``(sizes of the pieces, the sequence of each)``.

    Each stays as it is, but one without a token, the rest of a pack of a fixed size: it is cut in pieces no longer than
    the longest that has one. Whole, it would cost its square.
    """
    longest = int(sizes[real].max())
    room, pieces, owners = MAX_PACK_SEQUENCES - len(sizes), [], []
    for number, size in enumerate(sizes.tolist()):
        count = 1 if real[number] or not size else min(-(-size // longest), room + 1)
        room -= count - 1
        pieces += [size // count + (part < size % count) for part in range(count)]
        owners += [number] * count
    return np.asarray(pieces), np.asarray(owners)


def _plan_thd(spec: MaskSpec, modes: dict[Rule, int], device: torch.device) -> NpuPlan:
    pieces, _ = _cut_pieces(np.asarray(spec.padded), np.asarray(spec.lengths) > 0)
    ends = np.cumsum(pieces).tolist()  # padding too: no slot may be left to the tail that nobody computes
    calls = {}
    for rule, mode in modes.items():
        if mode == 1:
            call = KernelCall(_shared_mask(rule, int(pieces.max())).to(device), mode)
        else:
            call = _compressed(rule, mode, device)
        calls[rule] = (replace(call, actual_seq_qlen=ends, actual_seq_kvlen=ends),)
    return NpuPlan(calls)


def _shared_mask(rule: Rule, length: int) -> Tensor:
    """Make one mask ``[length, length]`` for every sequence of a pack, True where a key is hidden.

    The rule must depend on positions alone.

    Raises:
        ValueError: it depends on more, and got here by an override of the table.
    """
    if rule.images or rule.prefix or not rule.causal:
        raise ValueError(
            f"attention: the NPU's kernel cannot compute {rule} in a pack; leave the cell out of "
            "--actor.attention-override"
        )
    position = np.arange(length)
    query, key = position[:, None], position[None]
    return torch.from_numpy(~rule.allows(query - key, False, False, query, key))


def _plan_indexed(spec: MaskSpec, modes: dict[Rule, int], device: torch.device) -> NpuPlan:
    """Calls whose keys are gathered, each query bottom-right against its sequence up to there: one call over the slots
    of a rank, or under context parallelism two, over the low chunks of all sequences and over the high ones."""
    if 1 in modes.values():
        kind = "under context parallelism" if spec.cp > 1 else "whose sequences share a prompt"
        advice = "leave the cell out of --actor.attention-override, or set --actor.share none"
        raise ValueError(f"attention: an NPU takes no mask of a pack {kind}; {advice}")
    modes = {rule: 3 if mode == 2 else mode for rule, mode in modes.items()}  # from the last key on, not the first
    padded = np.asarray(spec.padded, dtype=np.int64)
    start, chunk = (np.cumsum(padded) - padded) // spec.cp, padded // (2 * spec.cp)
    parts = [(half * chunk, chunk, end * chunk) for half, end in enumerate(_count_chunks(spec))]
    calls, order = [], []
    for first, queries, ends in parts if spec.cp > 1 else [(0 * padded, padded, padded)]:
        asking = np.flatnonzero(queries)  # a sequence may have all of its slots from another
        real = np.asarray(spec.lengths)[asking] > 0
        # What fills a fixed size sees itself: nobody reads it.
        keys = np.where(real, spec.begins[asking] + ends[asking], queries[asking])
        owner, within = expand_counts(queries[asking])
        key_owner, position = expand_counts(keys)
        slots = (start + first)[asking[owner]] + within
        pieces, whose = _cut_pieces(queries[asking], real)
        order.append(slots)
        calls.append(
            {
                "actual_seq_qlen": np.cumsum(pieces).tolist(),
                "actual_seq_kvlen": np.cumsum(np.where(real[whose], keys[whose], pieces)).tolist(),
                "query_index": torch.from_numpy(slots).to(device) if spec.cp > 1 else None,
                "key_index": torch.from_numpy(spec.locate_keys(asking[key_owner], position)).to(device),
            }
        )
    planned = {
        rule: tuple(replace(_compressed(rule, mode, device), **call) for call in calls) for rule, mode in modes.items()
    }
    return NpuPlan(planned, torch.from_numpy(np.concatenate(order).argsort()).to(device) if spec.cp > 1 else None)
