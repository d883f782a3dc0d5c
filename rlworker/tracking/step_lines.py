"""Files of a run with one line of JSON for each step; the lines of later steps are removed when the run goes back."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
"""File with the metrics of each step."""
PROMPTS = "prompts.jsonl"
"""File with the prompts of each step: number of the step's first rollout, and numbers of its rows in order."""

VALIDATIONS = "validation.jsonl"
"""File with the table of each validation, by held-out set and source."""


def spell_line(values: Mapping[str, Any]) -> str:
    """Spell values as a line of standard JSON, in which a number that is not finite is null.

    Numbers of numpy and torch, which a user's loss or tracker may give, are written as Python's.
    """
    return json.dumps(_plain(values), allow_nan=False) + "\n"


def read_line(line: str) -> dict[str, Any]:
    """Read a line of metrics; null is NaN, so that a metric that was not finite has no number and is no gap."""
    return {name: math.nan if value is None else value for name, value in json.loads(line).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def keep_steps(path: Path, last: int) -> int:
    """Remove the lines of steps after ``last`` from a file, if it exists. Returns the number of removed lines."""
    if not path.exists():
        return 0
    lines = path.read_text().splitlines()
    kept_lines = [line for line in lines if _read_step(line) <= last]
    write_whole(path, "".join(line + "\n" for line in kept_lines))
    return len(lines) - len(kept_lines)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never seen half-written: under another name until it is on disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_step(line: str) -> float:
    """Read the step of a line; a line cut short by a kill counts as later than any checkpoint."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")
