"""The NPU's attention plan: each rule as calls of ``npu_fusion_attention``, built once for all layers."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hardware.attention.dense_mask import build_dense_mask
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, expand_counts, list_zigzag_positions, locate_gathered_keys
from hardware.attention.rules import CAUSAL, Rule, count_tokens_before
from hardware.npu.kernel_call import NO_LIMIT, build_triangle
from hardware.npu.limits import MAX_PACK_SEQUENCES


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel.

    Attributes:
        atten_mask, ..., actual_seq_kvlen: the kernel's keywords of the same names.
        query_index: ``[q]``, the slots whose queries it takes; None takes all.
        key_index: ``[k]``, into the keys gathered over the context-parallel ranks; None takes all.
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


def build_attention_inputs(spec: MaskSpec, rotary: tuple[Tensor, Tensor], modes: dict[Rule, int]) -> AttentionInputs:
    """Build the inputs for rules that the capability table lets through.

    Args:
        modes: the ``sparse_mode`` that the table names for each rule.

    Raises:
        ValueError: more sequences than the kernel takes in a pack.
    """
    device = rotary[0].device
    if spec.kind == "bshd":
        return AttentionInputs.build(spec, rotary, _plan_bshd(spec, modes, device))
    if len(spec.padded) > MAX_PACK_SEQUENCES:
        raise ValueError(
            f"attention: an NPU takes at most {MAX_PACK_SEQUENCES} sequences in a pack, got {len(spec.padded)}; lower "
            "--actor.micro-batch-tokens"
        )
    plan = _plan_thd(spec, modes, device) if spec.cp == 1 else _plan_thd_cp(spec, modes, device)
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


def _cut_pieces(spec: MaskSpec, sizes: np.ndarray) -> np.ndarray:
    """Split the sequence without tokens of a pack of a fixed size; returns the sizes that the kernel gets.

    Other sequences stay whole. The pieces are no longer than the longest real sequence, as far as the kernel's limit on
    sequences allows: attention over the whole would take time by the square of its length.
    """
    longest = max(size for size, tokens in zip(sizes, spec.lengths) if tokens)
    room, pieces = MAX_PACK_SEQUENCES - len(sizes), []  # room: further pieces that the kernel takes
    for size, tokens in zip(sizes.tolist(), spec.lengths):
        count = 1 if tokens or not size else min(-(-size // int(longest)), room + 1)
        room -= count - 1
        pieces += [size // count + (number < size % count) for number in range(count)]  # equal sizes, to one
    return np.asarray(pieces)


def _plan_thd(spec: MaskSpec, modes: dict[Rule, int], device: torch.device) -> NpuPlan:
    pieces = _cut_pieces(spec, np.asarray(spec.padded))
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
        raise ValueError(f"attention: the NPU's kernel cannot be told {rule} of a pack; leave out the override")
    position = np.arange(length)
    query, key = position[:, None], position[None]
    return torch.from_numpy(~rule.allows(query - key, False, False, query, key))


def _plan_thd_cp(spec: MaskSpec, modes: dict[Rule, int], device: torch.device) -> NpuPlan:
    """Plan two calls, the low chunks of all sequences and the high chunks, each bottom-right against its prefix."""
    if 1 in modes.values():
        raise ValueError("attention: an NPU takes no mask of a pack under context parallelism; leave out the override")
    padded = np.asarray(spec.padded, dtype=np.int64)
    pieces = _cut_pieces(spec, padded // (2 * spec.cp))
    chunk, local = padded // (2 * spec.cp), padded // spec.cp  # [B]: slots of a chunk, and of a sequence on a rank
    start = np.cumsum(local) - local  # [B]: first slot of each sequence on a rank
    halves = []
    for half, end in enumerate(_count_chunks(spec)):
        owner, within = expand_counts(chunk)  # [q]: sequence of each query, and its place in the chunk
        key_owner, position = expand_counts(chunk * end)  # [k]: sequence of each key, and its position there
        # A sequence's slots on a rank are its low chunk, then its high chunk.
        queries = start[owner] + half * chunk[owner] + within
        keys = locate_gathered_keys(spec.cp, start[key_owner], chunk[key_owner], position, int(local.sum()))
        halves.append(
            {
                "actual_seq_qlen": np.cumsum(pieces).tolist(),
                "actual_seq_kvlen": np.cumsum(pieces * end).tolist(),
                "query_index": torch.from_numpy(queries).to(device),
                "key_index": torch.from_numpy(keys).to(device),
            }
        )
    calls = {
        rule: tuple(replace(_compressed(rule, mode, device), **half) for half in halves) for rule, mode in modes.items()
    }
    # The calls' outputs end to end are in the order of their queries; argsort inverts that order to slots.
    return NpuPlan(calls, torch.cat([half["query_index"] for half in halves]).argsort())
