"""Optimizer steps that were refused because of a gradient that is not finite, and the rows of their batch."""

import json
from pathlib import Path

import torch
from torch import Tensor

from engines.batch.batch import COLUMNS, TrainBatch
from engines.batch.shard import Outputs, list_columns
from rlworker.base.errors import RunError


def find_offending_rows(batch: TrainBatch, outputs: dict[str, Tensor]) -> dict[int, list[str]]:
    """Find the sequences that hold numbers which are not finite.

    Args:
        outputs: name -> column ``[N]`` that the actor computed before the refused step.

    Returns:
        number of a sequence -> names of the columns. If all numbers are finite, the backward pass made the gradient
            infinite: then every sequence is listed, with an empty list.
    """
    sequence = torch.repeat_interleave(torch.tensor(batch.lengths))
    names_by_row: dict[int, list[str]] = {}
    for name, column in (*batch.columns().items(), *((f"now_{name}", column) for name, column in outputs.items())):
        about = COLUMNS.get(name)
        if about and about.blank == -torch.inf:
            column = column.masked_fill(column == -torch.inf, 0.0)  # an entry that is not used
        if column.is_floating_point():
            positions = (~column.isfinite()).nonzero()[:, 0]
            rows = positions if about and about.kind == "sequence" else sequence[positions].unique()
            for row in rows.tolist():
                names_by_row.setdefault(row, []).append(name)
    return dict(sorted(names_by_row.items())) or {row: [] for row in range(len(batch))}


def save_rejected(path: Path, batch: TrainBatch, outputs: dict[str, Tensor], tokenizer) -> int:
    """Write the offending rows to ``path``, one JSON line each, and return their number."""
    rows = find_offending_rows(batch, outputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row, columns in rows.items():
            one = batch.select(row, row + 1)
            ids = [*one.inputs[:1].tolist(), *one.targets.tolist()]
            line = {"row": row, "not_finite": columns, "text": tokenizer.decode(ids), "ids": ids}
            if one.images and one.images[0]:
                line["images"] = [{"path": i.path, "grid": i.grid, "place": i.place} for i in one.images[0]]
            first = sum(batch.lengths[:row])
            now = {f"now_{name}": column[first : first + one.num_tokens] for name, column in outputs.items()}
            for name, column in (one.columns() | now).items():
                if column.is_floating_point() and column.dim() == 1:  # JSON has no word for NaN
                    line[name] = [value if abs(value) < float("inf") else str(value) for value in column.tolist()]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return len(rows)


def reject_step(run: Path, step: int, role: str, batch: TrainBatch, outputs: Outputs, tokenizer) -> None:
    """Write the rows that may have caused a gradient that is not finite into the run folder, and raise RunError.

    The engine has kept its weights.

    Args:
        run: the run folder. step: number of the refused step. role: ``actor`` or ``critic``.
        batch: batch of the step. outputs: outputs of the engine on the batch.
    """
    rate = "--critic.lr" if role == "critic" else "--actor.optimizer.lr"
    path = run / "rejected" / f"step_{step:06d}.jsonl"
    count = save_rejected(path, batch, list_columns(outputs), tokenizer)
    raise RunError(
        f"step {step}: the {role}'s gradient is not finite, so the step was not taken. {count} of {len(batch)} rows "
        f"may be why: see {path}. If their numbers are finite, lower {rate} or --actor.optimizer.clip-grad; if not, "
        "correct the reward, advantage or loss that made them"
    )
