"""CUDA's attention plan: each rule as one or two calls of ``varlen_attn``, built once for all layers.

Under every rule a query sees one interval of positions. It begins with the query's window or chunk and ends with the
query itself or, where the rule opens the future, with its image, its prefix or its sequence. ``varlen_attn`` takes runs
of queries, each with keys up to the end of what the run sees, and a window that is counted from the last key. So one
call computes every slot as if nobody saw the future, and a second one computes those anew that do.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, expand_counts
from hardware.attention.rules import Rule, count_tokens_before
from hardware.transfer import to_device


@dataclass(frozen=True)
class VarlenCall:
    """One call of the kernel, over slots that lie sequence after sequence.

    Attributes:
        cu_seq_q, ..., window_size: the kernel's arguments of the same names.
        query_index: ``[q]``, the slots whose queries it takes; None takes all as they lie.
        key_index: ``[k]``, into the keys of all context-parallel ranks; None takes all as they lie.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window_size: tuple[int, int]
    query_index: Tensor | None = None
    key_index: Tensor | None = None


@dataclass(frozen=True)
class RuleCalls:
    """The calls of one rule.

    Attributes:
        base: computes every slot.
        opened: computes those anew that see the future; None where there are none.
        rows: ``[n]``, the outputs of ``opened`` that count; None counts all.
        slots: ``[n]``, the slots whose outputs of ``base`` they replace.
    """

    base: VarlenCall
    opened: VarlenCall | None = None
    rows: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True)
class VarlenPlan:
    """The calls of every rule."""

    calls: dict[Rule, RuleCalls]


@dataclass(frozen=True)
class _Places:
    """The contents of this rank's slots, ``[slots]`` each.

    Attributes:
        low, high: the part of the sequence out of which a slot's token does not see: its chunk, or everything.
    """

    sequence: np.ndarray
    position: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def find_runs(self, *alike: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find ``(first slot, count)`` of the longest runs at consecutive positions of a sequence and a part of it,
        within which the arrays do not change."""
        starts = np.ones(len(self.position), bool)
        starts[1:] = np.diff(self.position) != 1
        for column in (self.sequence, self.low, *alike):
            starts[1:] |= np.diff(column) != 0
        first = np.flatnonzero(starts)
        return first, np.diff(first, append=len(self.position))


def build_attention_inputs(spec: MaskSpec, rotary: tuple[Tensor, Tensor]) -> AttentionInputs:
    """Build the inputs where ``varlen_attn`` takes the heads, for rules that the capability table lets through.

    Raises:
        ValueError: a rule sees images both ways, and the tokens of one are not side by side.
    """
    # Rows end to end are a pack too, of sequences that are all padded to one length.
    pack = spec if spec.kind == "thd" else replace(spec, kind="thd")
    return AttentionInputs.build(spec, rotary, _plan_pack(pack, rotary[0].device))


def _plan_pack(spec: MaskSpec, device: torch.device) -> VarlenPlan:
    return VarlenPlan({rule: _plan_calls(spec, rule, device) for rule in set(spec.rules)})


def _plan_calls(spec: MaskSpec, rule: Rule, device: torch.device) -> RuleCalls:
    longest = spec.longest
    rule = replace(  # what reaches past the longest sequence changes nothing
        rule,
        window=None if rule.window is None or rule.window >= longest else rule.window,
        chunk=None if rule.chunk is None or rule.chunk >= longest else rule.chunk,
    )
    places = _locate_slots(spec, rule)
    first, count = places.find_runs()
    position, low = places.position[first], places.low[first]
    if not rule.causal:
        ends = np.maximum(np.asarray(spec.lengths), 1)[places.sequence[first]]  # padding sees, and is not seen
        call = _build_call(
            spec, places.sequence[first], count, (0 * low, ends), _convert_window(rule, True, longest), device
        )
        return RuleCalls(call)
    keys = np.maximum(low, position - _count_reach_back(rule, longest)), position + count
    base = _build_call(spec, places.sequence[first], count, keys, _convert_window(rule, False, longest), device)
    ends = _find_ends(spec, rule, places)
    first, count = places.find_runs(ends)
    seeing = ends[first] > places.position[first] + 1
    if not seeing.any():
        return RuleCalls(base)
    return _reopen(spec, rule, places, (first[seeing], count[seeing]), ends, base)


def _reopen(
    spec: MaskSpec,
    rule: Rule,
    places: _Places,
    runs: tuple[np.ndarray, np.ndarray],
    ends: np.ndarray,
    base: VarlenCall,
) -> RuleCalls:
    """``base`` and the second call, over runs of slots that see the future up to the same end."""
    first, count = runs
    position, end, device = places.position[first], ends[first], base.cu_seq_q.device
    longest = spec.longest
    # A window is counted from the last key. Where context parallelism or a chunk cuts an image, copies of the last
    # query stand for those that are elsewhere, and nobody reads what they get.
    queries = end - position if rule.window else count
    owner, within = expand_counts(queries)
    own = within < count[owner]
    slots = first[owner] + np.minimum(within, count[owner] - 1)
    keys = np.maximum(places.low[first], position - _count_reach_back(rule, longest)), end
    call = _build_call(spec, places.sequence[first], queries, keys, _convert_window(rule, True, longest), device)
    call = replace(call, query_index=to_device(slots, device))
    if own.all():
        return RuleCalls(base, call, None, call.query_index)
    return RuleCalls(base, call, to_device(np.flatnonzero(own), device), to_device(slots[own], device))


def _locate_slots(spec: MaskSpec, rule: Rule) -> _Places:
    """A sequence without tokens, the rest of a pack of a fixed size, is cut into parts no longer than the longest that
    has some: whole, it would cost its square."""
    sequence, position = spec.locate_slots(spec.cp_rank)
    positions, real = spec.begins + spec.padded, np.asarray(spec.lengths) > 0
    size = np.full(len(positions), rule.chunk or spec.longest)
    size[~real] = np.minimum(size[~real], positions[real].max(initial=1))
    low = position // size[sequence] * size[sequence]
    return _Places(sequence, position, low, low + size[sequence])


def _find_ends(spec: MaskSpec, rule: Rule, places: _Places) -> np.ndarray:
    """Find the end of what each slot sees, ``[slots]``: past itself, or past its image or prefix."""
    sequence, position = places.sequence, places.position
    ends = position + 1
    if rule.images:
        ends = np.maximum(ends, _find_image_ends(spec, sequence, position))
    if rule.prefix:
        prefix = np.asarray(spec.prefixes)[sequence]
        ends = np.where(position < prefix, np.maximum(ends, prefix), ends)
    return np.minimum(ends, places.high)


def _find_image_ends(spec: MaskSpec, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Find the position past the end of the image at each place, 0 where there is none. The arrays broadcast."""
    lengths, blocks = np.asarray(spec.lengths), np.asarray(spec.image_block)
    owner, within = expand_counts(lengths)
    starts = np.ones(len(blocks), bool)
    starts[1:] = (np.diff(owner) != 0) | (np.diff(blocks) != 0)
    first = np.flatnonzero(starts)
    named = np.stack([owner[first], blocks[first]])[:, blocks[first] >= 0]
    if len(np.unique(named, axis=1).T) < named.shape[1]:
        raise ValueError(
            "attention: the tokens of an image are not side by side in image_block, and the CUDA kernel is told an "
            "image as one run of tokens; give each run a number of its own"
        )
    count = np.diff(first, append=len(blocks))
    ends = np.repeat(within[first] + count, count)
    inside = position < lengths[sequence]
    token = np.where(inside, (np.cumsum(lengths) - lengths)[sequence] + position, 0)
    return np.where(inside & (blocks[token] >= 0), ends[token], 0)


def _count_reach_back(rule: Rule, longest: int) -> int:
    """Count the tokens before it that the first query of a run sees."""
    return longest if rule.window is None else count_tokens_before(rule.window)


def _convert_window(rule: Rule, sees_future: bool, longest: int) -> tuple[int, int]:
    """Return ``window_size``: how far a query sees before and after the place that is as far from the last key as it is
    from the last query.

    Never (-1, -1), which says that all see all: for that torch 2.14 may take cuDNN's kernel, whose backward reads where
    nothing is (PyTorch's pull request 186142). As many as there are keys says the same.
    """
    if not sees_future:
        return count_tokens_before(rule.window), 0
    return _count_reach_back(rule, longest), -1


def _build_call(
    spec: MaskSpec,
    sequence: np.ndarray,
    queries: np.ndarray,
    keys: tuple[np.ndarray, np.ndarray],
    window_size: tuple[int, int],
    device: torch.device,
) -> VarlenCall:
    """Build the call of runs of so many queries of a sequence each, which see keys ``first <= position < end``."""
    first, end = keys
    owner, within = expand_counts(end - first)
    index = spec.locate_keys(sequence[owner], first[owner] + within)
    as_they_lie = np.array_equal(index, np.arange(sum(spec.padded)))
    cu_seq_q = to_device(_accumulate(queries), device)
    same = np.array_equal(queries, end - first)
    return VarlenCall(
        cu_seq_q,
        cu_seq_q if same else to_device(_accumulate(end - first), device),
        int(queries.max()),
        int((end - first).max()),
        window_size,
        key_index=None if as_they_lie else to_device(index, device),
    )


def _accumulate(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
