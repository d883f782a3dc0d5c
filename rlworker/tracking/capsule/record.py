"""Record the optimizer steps of a training engine, with sketches of all that it computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from engines.batch.batch import TrainBatch
from engines.batch.schedule import Schedule
from engines.batch.shard import Outputs, list_columns
from engines.interfaces import LossFn
from rlworker.cluster.train_group import WorkerGroup
from rlworker.tracking.capsule.compare import measure_rounding
from rlworker.tracking.capsule.files import SLOPE, Update

_STATES = "engines.probes.states:"
_ROUNDINGS = 2
"""Number of forward passes that are rounded otherwise."""


@dataclass
class Recording:
    """The optimizer steps of an engine, complete once ``recording`` has ended.

    Attributes:
        weights: HF name -> digest of every weight before the first of them. updates: the steps. losses: loss of each.
    """

    weights: dict[str, int] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    losses: list[LossFn] = field(default_factory=list)


@contextmanager
def recording(group: WorkerGroup, dtype: str, span: int = 0) -> Iterator[Recording]:
    """Record the optimizer steps that an engine takes in this context.

    Args:
        dtype: name of the type whose rounding is measured.
        span: number of successive tokens that have one sketch; 0 takes as many as ``choose_span`` does.
    """
    made = Recording()
    told: list[tuple[Schedule, Outputs, list[Update]]] = []

    def note(batch: TrainBatch, loss: LossFn, denominator: float, schedule: Schedule) -> Callable:
        if not made.updates:
            parts = group.run(f"{_STATES}digest_weights")
            made.weights = {name: digest for part in parts for name, digest in part.items()}
        rows = [[micro.tolist() for micro in replica] for replica in schedule.rows]
        blank = Update(batch, denominator, rows, schedule.digest, {}, {}, np.empty(0), np.empty(0))
        rounded = []  # by the weights before the step
        for seed in range(_ROUNDINGS):
            records = group.run(f"{_STATES}record_rounded", schedule.shards(batch), loss, dtype, seed)
            outputs = {p["dp_rank"]: one.outputs for p, one in zip(group.places, records, strict=True) if one.outputs}
            restored = schedule.restore([outputs[number] for number in range(group.dp_size)])
            rounded.append(replace(blank, **join_records(group, schedule, records, restored)))

        def note_result(metrics: dict[str, float], outputs: Outputs) -> None:
            made.losses.append(loss)
            told.append((schedule, outputs, rounded))
            made.updates.append(replace(blank, metrics={name: float(value) for name, value in metrics.items()}))

        return note_result

    group.run(f"{_STATES}begin_records")
    group.observer = note
    try:
        yield made
    finally:
        group.observer = None
    records = list(zip(*group.run(f"{_STATES}take_records"), strict=True))  # by optimizer step, then by rank
    for number, (of_ranks, (schedule, outputs, rounded)) in enumerate(zip(records, told, strict=True)):
        whole = replace(made.updates[number], **join_records(group, schedule, of_ranks, outputs))
        size = span or whole.choose_span(len(records))
        pooled = whole.pool(size)
        made.updates[number] = replace(pooled, rounding=measure_rounding(pooled, [one.pool(size) for one in rounded]))


def join_records(group: WorkerGroup, schedule: Schedule, records: Any, outputs: Outputs) -> dict[str, Any]:
    """Join the records of an optimizer step on all ranks, in the order of the batch.

    Args:
        outputs: the outputs ``[N]``.

    Returns:
        ``columns``, ``values`` and ``bits`` of ``Update``.
    """

    def join(name: str) -> dict[Any, np.ndarray]:
        by_replica: list[dict] = [{} for _ in range(group.dp_size)]
        for place, record in zip(group.places, records, strict=True):
            by_replica[place["dp_rank"]] |= getattr(record, name)
        return {
            key: schedule.restore_order(torch.cat([part[key] for part in by_replica])).numpy() for key in by_replica[0]
        }

    values, bits = join("values"), join("bits")
    columns = {name: column.numpy() for name, column in list_columns(outputs).items() if column.dim() == 1}
    columns |= {SLOPE + name: column for name, column in join("slopes").items()}
    stages = sorted(values)
    return {
        "columns": columns,
        "values": np.stack([values[stage] for stage in stages]),
        "bits": np.stack([bits[stage] for stage in stages]),
    }
