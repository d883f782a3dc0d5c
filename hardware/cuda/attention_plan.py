"""CUDA's attention plan: each rule as one or two calls of ``varlen_attn``, built once for all layers.

Under every rule a query sees one interval of positions. It begins with the query's window or chunk. It ends with the
query itself or, where the rule makes future tokens visible, with its image, its prefix or its sequence. ``varlen_attn``
takes runs of queries, each with keys up to the end of the run's interval, and a window that is counted from the last
key. So a first call computes every slot as causal, and a second call recomputes the slots that see the future.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hardware.attention import grouped_sdpa
from hardware.attention.capabilities import find_backend
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, expand_counts
from hardware.attention.rules import Rule, count_tokens_before
from hardware.cuda.kernel_call import HEAD_UNIT, MAX_HEAD
from hardware.transfer import to_device

if TYPE_CHECKING:  # models without states load nothing of them
    from hardware.attention.delta_rule import DeltaPlan
    from hardware.cuda.platform import CudaAttention


@dataclass(frozen=True)
class VarlenCall:
    """One call of ``varlen_attn``, over slots that lie sequence after sequence.

    Attributes:
        cu_seq_q, ..., window_size: the kernel's arguments of the same names.
        query_index: ``[q]``, the slots whose queries are passed; None passes all in order.
        key_index: ``[k]``, index into the keys gathered over the context-parallel ranks; None passes all in order.
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
        base: the call that computes every slot as causal.
        opened: the call that recomputes slots that see the future; None where no slot does.
        rows: ``[n]``, the rows of the output of ``opened`` that are used; None uses all.
        slots: ``[n]``, the slots whose outputs of ``base`` these rows replace.
    """

    base: VarlenCall
    opened: VarlenCall | None = None
    rows: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True)
class VarlenPlan:
    """The calls of ``varlen_attn`` for one micro-batch: rule -> its one or two calls. A layer looks up its rule."""

    calls: dict[Rule, RuleCalls]


@dataclass(frozen=True)
class _Places:
    """Sequence and position of this rank's slots, ``[slots]`` each.

    Attributes:
        sequence: number of the slot's sequence. position: its position in that sequence, from 0.
        low, high: first and end (exclusive) of the slot's chunk; without chunks of the whole sequence. A token sees
            positions within it alone.
    """

    sequence: np.ndarray
    position: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def find_runs(self, *alike: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find ``(first slot [runs], number of slots [runs])`` of the longest runs that the kernel takes as one.

        Slots of a run have consecutive positions in one sequence and one chunk, and equal values in each of ``alike``.
        """
        # [slots] bool: a run starts where the position does not follow the slot before, or any column changes.
        starts = np.ones(len(self.position), bool)
        starts[1:] = np.diff(self.position) != 1
        for column in (self.sequence, self.low, *alike):
            starts[1:] |= np.diff(column) != 0
        first = np.flatnonzero(starts)
        return first, np.diff(first, append=len(self.position))


def lower(
    platform: "CudaAttention", spec: MaskSpec, rotary: tuple[Tensor, Tensor], override: tuple[str, ...]
) -> AttentionInputs:
    """Lower a mask to ``varlen_attn`` if it takes the heads, else to grouped SDPA; ``Platform.build_attention_inputs``
    says more."""
    head, dtype = rotary[0].shape[-1], str(rotary[0].dtype).removeprefix("torch.")
    takes = dtype in platform.varlen_types and head <= MAX_HEAD and head % HEAD_UNIT == 0
    has_states = any(rule.state for rule in spec.rules)
    kernel = platform.find_state_kernel() if has_states and dtype in platform.varlen_types else None
    backends = "torch_varlen" if takes else "torch_sdpa", "fla_delta" if kernel else "torch_delta"
    for rule in set(spec.rules):
        find_backend(backends, spec.kind, spec.cp, rule, override)
    delta = platform.load("delta_rule").build_plan(spec, kernel, rotary[0].device) if kernel else None
    build = build_attention_inputs if takes else grouped_sdpa.build_attention_inputs
    return build(spec, rotary, delta)


def build_attention_inputs(
    spec: MaskSpec, rotary: tuple[Tensor, Tensor], delta: "DeltaPlan | None" = None
) -> AttentionInputs:
    """Build the inputs of CUDA's core attention, for rules that the capability table accepts.

    They are for ``varlen_attn`` if it takes the heads, else for grouped SDPA.

    Args:
        delta: as in ``AttentionInputs.build``.

    Raises:
        ValueError: a rule sees images both ways, and the tokens of an image are not adjacent.
    """
    # Rows end to end are a pack too, of sequences that are all padded to one length.
    pack = spec if spec.kind == "thd" else replace(spec, kind="thd")
    return AttentionInputs.build(spec, rotary, _plan_pack(pack, rotary[0].device), delta)


def _plan_pack(spec: MaskSpec, device: torch.device) -> VarlenPlan:
    return VarlenPlan({rule: _plan_calls(spec, rule, device) for rule in spec.attended})


def _plan_calls(spec: MaskSpec, rule: Rule, device: torch.device) -> RuleCalls:
    longest = spec.longest
    rule = replace(  # what reaches past the longest sequence changes nothing
        rule,
        window=None if rule.window is None or rule.window >= longest else rule.window,
        chunk=None if rule.chunk is None or rule.chunk >= longest else rule.chunk,
    )
    places = _locate_slots(spec, rule)
    # [runs]: without context parallelism a run is a sequence or a chunk of it; with it, one of a rank's two halves.
    first, count = places.find_runs()
    position, low = places.position[first], places.low[first]
    if not rule.causal:
        # Keys 0 to length: padding slots are queries but never keys; a sequence without tokens keeps one key.
        ends = np.maximum(np.asarray(spec.lengths), 1)[places.sequence[first]]
        call = _build_call(
            spec, places.sequence[first], count, (0 * low, ends), _convert_window(rule, True, longest), device
        )
        return RuleCalls(call)
    # [runs]: keys from the first that the run's first query sees up to the run's own last position, which makes the
    # kernel's bottom-right causal mask right for every query of the run.
    keys = np.maximum(low, position - _count_reach_back(rule, longest)), position + count
    base = _build_call(spec, places.sequence[first], count, keys, _convert_window(rule, False, longest), device)
    ends = _find_ends(spec, rule, places)
    # Runs anew, of slots with one common end. A run whose end is just past its first slot sees no future.
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
    """Return ``base`` with a second call that recomputes slots that see the future.

    Args:
        runs: first slot and number of slots ``[runs]``; the slots of a run see up to the same end.
        ends: ``[slots]``, the end of the interval that each slot sees.
    """
    first, count = runs
    position, end, device = places.position[first], ends[first], base.cu_seq_q.device
    longest = spec.longest
    # A window is counted from the last key. Where context parallelism or a chunk cuts an image, copies of the last
    # query stand for those that are elsewhere, and nobody reads what they get.
    queries = end - position if rule.window else count
    owner, within = expand_counts(queries)  # [q]: the run of each query, and its number in the run
    own = within < count[owner]  # [q] bool: a slot of this rank, not a copy
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
    """Find the end (exclusive) of the interval that each slot sees, ``[slots]``: of itself, its image or its prefix."""
    sequence, position = places.sequence, places.position
    ends = position + 1
    if rule.images:
        ends = np.maximum(ends, _find_image_ends(spec, sequence, position))
    if rule.prefix:
        prefix = np.asarray(spec.prefixes)[sequence]
        ends = np.where(position < prefix, np.maximum(ends, prefix), ends)
    return np.minimum(ends, places.high)


def _find_image_ends(spec: MaskSpec, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Find the end (exclusive) of the image at each position of a sequence, 0 for text. The arrays broadcast."""
    lengths, blocks = np.asarray(spec.lengths), np.asarray(spec.image_block)
    owner, within = expand_counts(lengths)  # [N]: sequence of each token, and its position there
    # [N] bool: a run of tokens with one image number in one sequence starts here.
    starts = np.ones(len(blocks), bool)
    starts[1:] = (np.diff(owner) != 0) | (np.diff(blocks) != 0)
    first = np.flatnonzero(starts)
    named = np.stack([owner[first], blocks[first]])[:, blocks[first] >= 0]
    if len(np.unique(named, axis=1).T) < named.shape[1]:
        raise ValueError(
            "attention: the tokens of an image are not adjacent in image_block, and the CUDA kernel takes an image as "
            "one run of tokens; give each run a number of its own"
        )
    count = np.diff(first, append=len(blocks))
    ends = np.repeat(within[first] + count, count)  # [N]: end of the run of each token, as a position of its sequence
    inside = position < lengths[sequence]  # padding belongs to no image
    token = np.where(inside, (np.cumsum(lengths) - lengths)[sequence] + position, 0)  # index into the N tokens
    return np.where(inside & (blocks[token] >= 0), ends[token], 0)


def _count_reach_back(rule: Rule, longest: int) -> int:
    """Count the tokens before the first query of a run that this query sees."""
    return longest if rule.window is None else count_tokens_before(rule.window)


def _convert_window(rule: Rule, sees_future: bool, longest: int) -> tuple[int, int]:
    """Return ``window_size``: the keys that a query sees before and after its diagonal key, aligned at the last key.

    The diagonal key of a query is as far from the last key as the query is from the last query. Never (-1, -1), an
    unlimited window: for it torch 2.14 may take cuDNN's kernel, whose backward reads out of bounds (PyTorch's pull
    request 186142). A window of as many keys as there are is equivalent.
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
    """Build a call from its runs.

    Args:
        sequence, queries: ``[runs]``, sequence and number of queries of each run.
        keys: first and end (exclusive) ``[runs]`` of the positions whose keys a run gets.
    """
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
