"""The gated delta rule by flash-linear-attention (FLA): one call of its kernels for the runs of each level.

Sources: ``chunk_gated_delta_rule`` of fla-core 0.6.0 and the kernels that it calls; 0.4.2 to 0.5.2 compared.
"""

import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hardware.attention import delta_rule
from hardware.attention.delta_rule import TAIL, DeltaPlan
from hardware.attention.mask_spec import MaskSpec, expand_counts
from hardware.transfer import to_device

LEAST_VERSION = (0, 5, 2)
"""Least fla-core: 0.5.0 is the first that takes more value heads than key heads, before 0.5.1 a run without tokens
shifts those after it, and before 0.5.2 its backward refuses a Hopper with any Triton from 3.4 on."""

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""``chunk_gated_delta_rule``, which returns outputs and, if asked to, the states after the last tokens."""


@cache  # asked for every micro-batch
def find_kernel() -> Kernel | None:
    """Return FLA's function; None if it is not installed, is older than ``LEAST_VERSION``, or RLWORKER_FLA is 0."""
    if os.environ.get("RLWORKER_FLA") == "0":
        return None
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < LEAST_VERSION:
        return None
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]  on machines with a GPU alone
        chunk_gated_delta_rule,
    )

    return chunk_gated_delta_rule


@dataclass(frozen=True)
class RunsCall:
    """The runs of one level, which one call of the kernels computes.

    Attributes:
        slots: number of places that the call covers.
        bounds: ``[runs + 1]`` int64, cu_seqlens. host_bounds: the same on the host, so that FLA reads no device.
        sources: the runs of the level before whose states these begin with; None if states are empty.
    """

    slots: int
    bounds: Tensor
    host_bounds: Tensor
    sources: Tensor | None


@dataclass(frozen=True)
class FlaPlan(DeltaPlan):
    """The runs of a micro-batch, end to end in one chunk, and the calls that compute them, built once for all layers.

    A run is cut where others go on from its state. Runs are in levels, as chunks are in a ``DeltaPlan``, and each run
    has its tail before it. With the sequences ``a b c | a b d | e`` and a tail of one token::

        level 0   [. a b] [. e]      level 1   [b c] [b d], both with the state after a b

    Of these the convolution leaves out the first tail. The others are places of the runs before them, without decay and
    without beta, so that they change no state.

    Attributes:
        kernel: FLA's function, or its emulator. calls: a call for each level.
    """

    kernel: Kernel
    calls: tuple[RunsCall, ...]

    def apply_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Apply the rule to the runs; arguments and outputs as of ``hardware.attention.delta_rule.delta_rule``, but in
        the type of the queries."""
        empty, sizes = ~self.filled[..., None, None], [call.slots for call in self.calls]
        decay, beta = (x.float().masked_fill(empty, 0).flatten(2) for x in (decay, beta))
        parts = zip(*(x.split(sizes, dim=1) for x in (query, key, value.flatten(2, 3), decay, beta)), strict=True)
        outs, states = [], None
        for call, part in zip(self.calls, parts, strict=True):
            out, states = self.kernel(
                *part,
                initial_state=None if call.sources is None or states is None else states.index_select(0, call.sources),
                output_final_state=call is not self.calls[-1],
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=call.bounds,
                cu_seqlens_cpu=call.host_bounds,
            )
            outs.append(out)
        return torch.cat(outs, dim=1).unflatten(2, value.shape[2:4])


def build_plan(spec: MaskSpec, kernel: Kernel, device: torch.device | str = "cpu") -> FlaPlan:
    """Build the plan of a micro-batch, of which the spec says where each sequence begins and ends.

    Args:
        kernel: computes the calls.

    Raises:
        ValueError: no sequence has a token.
    """
    runs = delta_rule.cut_runs(spec)
    levels: list[int] = []
    for *_, parent in runs:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    order, counts = np.argsort(levels, kind="stable"), np.bincount(levels)
    row = np.empty(len(order), np.int64)  # of each run, within its level
    row[order] = expand_counts(counts)[1]
    sequence, start, end, parent = np.asarray(runs)[order].T

    run, within = expand_counts(end - start + TAIL)
    position = start[run] + within - TAIL
    slots, total = delta_rule.find_slots(spec, sequence[run], np.maximum(position, 0)), sum(spec.padded)
    filled, places = within[TAIL:] >= TAIL, np.zeros(total, np.int64)
    places[slots[TAIL:][filled]] = np.flatnonzero(filled)

    bounds, calls = np.append(np.cumsum(end - start + TAIL) - (end - start + TAIL), len(filled)), []
    for last in np.cumsum(counts).tolist():
        first = last - counts[len(calls)]
        own = bounds[first : last + 1] - bounds[first]
        sources = to_device(row[parent[first:last]], device) if calls else None
        calls.append(RunsCall(int(own[-1]), to_device(own, device), torch.from_numpy(own), sources))
    return FlaPlan(
        to_device(np.where(position >= 0, slots, total)[None], device),
        to_device(filled[None], device),
        to_device(places.reshape(spec.cp, -1)[spec.cp_rank], device),
        (1,),
        (None,),
        kernel,
        tuple(calls),
    )
