"""Files of a run with one line of JSON for each step; the lines of later steps are removed when the run goes back."""

import json
import os
from pathlib import Path

METRICS = "metrics.jsonl"
"""File with the metrics of each step."""
PROMPTS = "prompts.jsonl"
"""File with the prompts of each step: number of the step's first rollout, and numbers of its rows in order."""

VALIDATIONS = "validation.jsonl"
"""File with the table of each validation, by held-out set and source."""


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
