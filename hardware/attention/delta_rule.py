"""The gated delta rule (arXiv:2412.06464) and the short convolution before it, over the sequences of a micro-batch.

A value head has a state ``S [dk, dv]``, which each token decays, corrects and reads::

    S <- exp(decay) * S;    S <- S + k (beta * (v - S^T k))^T;    o = S^T q

State and convolution begin anew with each sequence. A sequence that shares its first tokens with another goes on from
the state after the last of them, and its convolution reads them. Everything is computed by chunks of tokens, in torch
alone and on any device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hardware.attention.mask_spec import MaskSpec, expand_counts
from hardware.attention.rules import CHUNK, MOST_TAPS
from hardware.transfer import to_device

TAIL = MOST_TAPS - 1
"""Tokens before a chunk that a convolution may read: its taps but the token's own."""
_EPSILON = 1e-6
"""Added to the squared norm of a query or key, as in transformers and FLA."""


@dataclass(frozen=True)
class DeltaPlan:
    """The chunks of a micro-batch and the state that each begins with, built once for all layers.

    Chunks are in levels: those of the first level begin with an empty state, those of another with the state after a
    chunk of the level before. With chunks of two tokens, of ``a b c | a b d | e`` whose second shares its beginning::

        level 0   [a b] [e .]      level 1   [c .] [d .], both with the state after [a b]

    Attributes:
        slots: ``[chunks, TAIL + C]`` the slot of each token of a chunk and of the ``TAIL`` tokens before it, among the
            slots of all context-parallel ranks in Megatron's order, ``[rank, s, b]``; their number where there is no
            token.
        filled: ``[chunks, C]`` bool, where a chunk has a token.
        places: ``[slots of this rank]`` the place of each slot's token in the flattened chunks; 0 for padding.
        counts: number of chunks of each level.
        sources: for each level, the rows of the level before whose states its chunks begin with; None for the first
            rows, in order.
    """

    slots: Tensor
    filled: Tensor
    places: Tensor
    counts: tuple[int, ...]
    sources: tuple[Tensor | None, ...]

    @classmethod
    def build(cls, spec: MaskSpec, device: torch.device | str = "cpu") -> DeltaPlan:
        """Build the plan of a micro-batch, of which the spec says where each sequence begins and ends.

        Raises:
            ValueError: no sequence has a token.
        """
        sequence, start, end, parent = (np.asarray(column) for column in zip(*cut_runs(spec), strict=True))
        size = min(CHUNK, 1 << (int((end - start).max()) - 1).bit_length())
        owner, step, level, source = _number_chunks(-(-(end - start) // size), parent)
        # Within a level those with most chunks to come are first, so that the states to go on from are first as well.
        left = (-(-(end - start) // size))[owner] - step
        order = np.lexsort((owner, -left, level))
        counts = np.bincount(level)
        row = np.empty(len(order), np.int64)
        row[order] = expand_counts(counts)[1]
        sources = [row[source[part]] for part in np.split(order, np.cumsum(counts)[:-1])[1:]]

        owner, step = owner[order], step[order]
        position = (start[owner] + step * size)[:, None] + np.arange(-TAIL, size)  # [chunks, TAIL + C]
        exists = (position >= 0) & (position < end[owner, None])
        slots = find_slots(spec, sequence[owner, None], np.clip(position, 0, end[owner, None] - 1))
        total, filled = sum(spec.padded), exists[:, TAIL:]
        places = np.zeros(total, np.int64)
        places[slots[:, TAIL:][filled]] = np.flatnonzero(filled)
        return cls(
            to_device(np.where(exists, slots, total), device),
            to_device(filled, device),
            to_device(places.reshape(spec.cp, -1)[spec.cp_rank], device),
            tuple(counts.tolist()),
            (None, *(None if (s == np.arange(len(s))).all() else to_device(s, device) for s in sources)),
        )

    def cut(self, rows: Tensor) -> Tensor:
        """Cut into chunks, each behind its tail: ``[slots of all ranks, D] -> [chunks, TAIL + C, D]``, zeros without a
        token."""
        return F.pad(rows, (0, 0, 0, 1)).index_select(0, self.slots.flatten()).unflatten(0, self.slots.shape)

    def join(self, chunks: Tensor) -> Tensor:
        """Put tokens back into this rank's slots: ``[chunks, C, ...] -> [slots of this rank, ...]``.

        A slot of padding gets what the first token has: nothing reads it.
        """
        return chunks.flatten(0, 1).index_select(0, self.places)

    def apply_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Apply the rule to the chunks of this plan, as ``delta_rule`` does; a plan of a platform calls its kernels."""
        return delta_rule(query, key, value, decay, beta, self)


def cut_runs(spec: MaskSpec) -> list[tuple[int, int, int, int]]:
    """Cut the tokens that each sequence has slots for where another goes on from them.

    Returns:
        for each run its sequence, its first position, the position after it, and the run whose state it begins with, or
        -1. That run comes before it.

    Raises:
        ValueError: no sequence has a token.
    """
    begins, owners = spec.begins.tolist(), spec.sharing.owners if spec.sharing else range(len(spec.lengths))
    points = [{*ends} for ends in zip(begins, spec.lengths, strict=True)]
    for begin, owner in zip(begins, owners, strict=True):
        if begin:
            points[owner].add(begin)
    runs = [(number, *run) for number, cuts in enumerate(points) for run in pairwise(sorted(cuts))]
    if not runs:
        raise ValueError(f"DeltaPlan: a micro-batch needs at least one token, got lengths {spec.lengths}")
    runs.sort(key=lambda run: run[1])
    numbers = {(number, end): i for i, (number, _, end) in enumerate(runs)}
    parents = [
        numbers[number if start > begins[number] else owners[number], start] if start else -1
        for number, start, _ in runs
    ]
    return [(*run, parent) for run, parent in zip(runs, parents, strict=True)]


def _number_chunks(counts: np.ndarray, parent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return run, number within it, level and source of each chunk, run after run; a source of the first level is -1.

    Args:
        counts: chunks of each run. parent: as in ``cut_runs``.
    """
    run, step = expand_counts(counts)
    first = [0] * len(counts)  # the level of each run's first chunk
    for number, before in enumerate(parent.tolist()):
        first[number] = first[before] + int(counts[before]) if before >= 0 else 0
    last = np.cumsum(counts) - 1
    source = np.where(step > 0, np.arange(len(run)) - 1, np.where(parent >= 0, last[parent], -1)[run])
    return run, step, np.asarray(first)[run] + step, source


def find_slots(spec: MaskSpec, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the slot of each position among those of all ranks, in Megatron's order. The arrays broadcast."""
    keys, rows = spec.locate_keys(sequence, position), len(spec.padded) if spec.kind == "bshd" else 1
    slots = sum(spec.padded) // spec.cp  # of a rank, as [b, s]
    rank, within = np.divmod(keys, slots)
    row, column = np.divmod(within, slots // rows)
    return rank * slots + column * rows + row


def convolve(chunks: Tensor, weight: Tensor) -> Tensor:
    """Convolve each channel over a token and those before it: ``[chunks, TAIL + C, D] -> [chunks, C, D]``.

    Args:
        weight: ``[D, taps]``, where D may be several axes; at most ``TAIL + 1`` of them, the token's own tap last.
    """
    first, size = TAIL + 1 - weight.shape[-1], chunks.shape[1] - TAIL
    taps = (chunks[:, first + i : first + i + size] * tap for i, tap in enumerate(weight.unbind(-1)))
    return sum(taps, chunks.new_zeros(()))


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON)


@dataclass(frozen=True)
class _Chunks:
    """Products within chunks, before states enter.

    Attributes:
        query, key: ``[chunks, G, C, dk]``, scaled. value: ``[chunks, G, R, C, dv]``.
        beta: ``[chunks, G, R, C]``. total: the same, decay from the first token to each.
        system, attention: ``[chunks, G, R, C, C]`` of a token's key, or query, with those of the tokens up to it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    total: Tensor
    system: Tensor
    attention: Tensor

    @classmethod
    def build(cls, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, plan: DeltaPlan) -> _Chunks:
        """Build from the arguments of ``delta_rule``."""
        empty = ~plan.filled[..., None, None]  # a slot without a token changes no state
        query = (_normalise(query.float()) * query.shape[-1] ** -0.5).transpose(1, 2)
        key = _normalise(key.float()).transpose(1, 2)
        value = value.float().permute(0, 2, 3, 1, 4)
        decay, beta = (x.float().masked_fill(empty, 0).permute(0, 2, 3, 1) for x in (decay, beta))
        total = decay.cumsum(-1)
        future = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=total.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
        # Products of queries and keys are those of a key head, whichever value heads share it.
        system = (key @ key.mT)[:, :, None] * between * beta[..., None]
        attention = (query @ key.mT)[:, :, None] * between
        return cls(query, key, value, beta, total, system, attention)

    def solve(self, right: Tensor) -> Tensor:
        """Solve the systems for right sides ``[chunks, G, R, C, n]``, which are scaled by beta first."""
        return torch.linalg.solve_triangular(self.system, right * self.beta[..., None], upper=False, unitriangular=True)

    def make_levels(self, counts: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Return the solved values and keys, attention, queries, transposed keys, and decay over a chunk, of each
        level."""
        grown = self.total.exp()
        scaled = torch.cat([self.value, self.key[:, :, None] * grown[..., None]], dim=-1)
        values, keys = self.solve(scaled).split((self.value.shape[-1], self.key.shape[-1]), dim=-1)
        query = self.query[:, :, None] * grown[..., None]
        key = self.key[:, :, None] * (self.total[..., -1:] - self.total).exp()[..., None]
        parts = (values, keys, self.attention, query, key.mT, grown[..., -1, None, None])
        return zip(*(part.split(counts) for part in parts), strict=True)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, plan: DeltaPlan) -> Tensor:
    """Apply the rule chunk by chunk, in fp32: the WY representation of the paper, section 3.3.

    Args:
        query, key: ``[chunks, C, G, dk]`` of G key heads, each scaled to length one here.
        value: ``[chunks, C, G, R, dv]``, of R value heads that share a key head.
        decay: ``[chunks, C, G, R]``, logarithms, at most 0. beta: the same, from 0 to 1.

    Returns:
        ``[chunks, C, G, R, dv]`` fp32.
    """
    chunks = _Chunks.build(query, key, value, decay, beta, plan)
    if len(plan.counts) == 1:  # no chunk begins with a state
        out = chunks.attention @ chunks.solve(chunks.value)
    else:
        out = torch.cat(_carry_states(zip(chunks.make_levels(plan.counts), plan.sources, strict=True)))
    return out.permute(0, 3, 1, 2, 4)


def continue_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, plan: DeltaPlan, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule on from states, as a rollout does that computed the tokens before.

    Arguments are those of ``delta_rule``, of sequences that share nothing, and:

    Args:
        states: ``[sequences, G, R, dk, dv]`` fp32, in the order of the first level's chunks.

    Returns:
        outputs as of ``delta_rule``, and the states after the last tokens, in the same order.
    """
    assert all(source is None for source in plan.sources), "rollouts share no beginnings"
    outs, ends = [], []
    levels = _Chunks.build(query, key, value, decay, beta, plan).make_levels(plan.counts)
    for (values, keys, attention, scaled, turned, kept), left in zip(levels, (*plan.counts[1:], 0), strict=True):
        values = values - keys @ states
        outs.append(scaled @ states + attention @ values)
        states = states * kept + turned @ values
        ends.append(states[left:])
        states = states[:left]
    return torch.cat(outs).permute(0, 3, 1, 2, 4), torch.cat(ends[::-1])


def _carry_states(levels: Iterable[tuple[tuple[Tensor, ...], Tensor | None]]) -> list[Tensor]:
    """Compute the outputs ``[chunks of a level, G, R, C, dv]`` of each level, with states from the level before.

    Args:
        levels: of each its entries of ``_Chunks.make_levels`` and of ``DeltaPlan.sources``.
    """
    outs: list[Tensor] = []
    state: Tensor | None = None
    before: tuple[Tensor, ...] = ()
    for (values, keys, attention, query, key, decay), source in levels:
        if before:
            # Of the chunks before, those that no other goes on from are last where sources are the first rows.
            added, written, kept = before if source is not None else (_take(x, len(values)) for x in before)
            after = added @ written
            state = after if state is None else _take(state, len(after)) * kept + after
            state = state if source is None else state.index_select(0, source)
            values = values - keys @ state
        out = attention @ values
        outs.append(out if state is None else query @ state + out)
        before = key, values, decay
    return outs


def _take(x: Tensor, rows: int) -> Tensor:
    """Take the first rows; all of them as they are, since the backward of a slice fills a tensor."""
    return x if rows == len(x) else x[:rows]
