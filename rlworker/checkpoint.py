"""The run folder: claimed once, written so that what is there is whole."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from rlworker.config import RunConfig

_COMPLETE = "trainer.json"
"""Written last into a checkpoint; the folder is renamed into place after it."""


class RunFolder:
    """Everything one run writes: config.json, metrics.jsonl, rollouts/, checkpoints/step_N/, report.html."""

    def __init__(self, path: str):
        self.path = Path(path)

    def check(self, resume: bool) -> None:
        """Raise ValueError where the folder cannot be used: it holds a run already, or there is none to resume."""
        if not self.path.name:
            raise ValueError("run_dir: no folder was given; set --run-dir")
        if resume and self.newest() is None:
            raise ValueError(f"run_dir: {str(self.path)!r} has no checkpoint to resume from; drop --resume")
        if not resume and (self.path / "config.json").exists():
            raise ValueError(
                f"run_dir: {str(self.path)!r} already holds a run; choose another --run-dir, or add --resume"
            )

    def claim(self, config: RunConfig) -> dict | None:
        """Make the folder this run's own.

        Returns:
            when resuming, the newest checkpoint's state with its ``folder``; metrics of later steps are cut off.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not config.resume:
            _write(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2))
            return None
        newest = self.newest()
        state = json.loads((newest / _COMPLETE).read_text())
        metrics = self.path / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        _write(metrics, "".join(line + "\n" for line in lines if _step_of(line) <= state["step"]))
        return state | {"folder": str(newest)}

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        folders = [f for f in self.path.glob("checkpoints/step_*") if (f / _COMPLETE).is_file()]
        return max(folders, key=lambda f: int(f.name.removeprefix("step_")), default=None)

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder to write a checkpoint into; it does not count before ``finish_checkpoint``."""
        partial = self.path / "checkpoints" / f".step_{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish_checkpoint(self, partial: Path, state: dict) -> Path:
        """Make a written checkpoint count, all at once."""
        _write(partial / _COMPLETE, json.dumps(state))
        final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        os.replace(partial, final)
        return final


def _step_of(line: str) -> float:
    """Step of a metrics line; a line cut short by a kill counts as later than any checkpoint."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, and only once its contents are on disk."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
