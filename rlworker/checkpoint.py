"""The run folder: claimed once, written so that what is there is whole."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from rlworker.config import TrainingConfig
from rlworker.errors import RunError

_COMPLETE = "trainer.json"
"""Written last into a checkpoint; the folder is renamed into place after it."""


_MAY_CHANGE = {"resume", "run_dir", "steps", "eval_every", "save_every", "ignore_logprob_diff", "trackers"}
_MAY_CHANGE |= {f"actor.{name}" for name in ("ranks", "tp", "pp", "cp", "layout", "micro_batch_tokens", "recompute")}
_MAY_CHANGE |= {"rollout.max_num_seqs", "actor.timeout_s", "logprob_diff_mean", "logprob_diff_max", "reward.workers"}
_MAY_CHANGE |= {"reward.time_limit_s", "separate", "actor.image_memory_mb", "rollout.image_memory_mb"}
"""Settings that a resumed run may change: how it is spread, how long it goes on and what it tells."""


class RunFolder:
    """Everything one run writes: config.json, metrics.jsonl, rollouts/, checkpoints/step_N/, report.html."""

    def __init__(self, path: str):
        self.given = path
        self.path = Path(path).absolute()  # other processes may run elsewhere

    def check(self, config: TrainingConfig) -> None:
        """See whether the folder can hold the run.

        Raises:
            ValueError: it holds a run already, or has none to resume, or one of other settings (keys named).
        """
        if self.given in ("", "."):
            raise ValueError("run_dir: no folder of its own was given; set --run-dir, such as --run-dir runs/mine")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run_dir: {str(self.path)!r} is not a folder; choose another --run-dir")
        claimed = (self.path / "config.json").exists()
        if config.resume and not claimed:
            raise ValueError(f"run_dir: {str(self.path)!r} holds no run to resume; drop --resume")
        if config.resume:
            self._check_same(config)
        elif claimed:
            raise ValueError(
                f"run_dir: {str(self.path)!r} already holds a run; choose another --run-dir, or add --resume"
            )

    def _check_same(self, config: TrainingConfig) -> None:
        try:
            stored = json.loads((self.path / "config.json").read_text())
        except ValueError as error:
            raise ValueError(f"run_dir: the config.json in {str(self.path)!r} cannot be read: {error}") from None
        # A setting that did not exist yet when the run was started had what is now its default.
        before = _flatten(dataclasses.asdict(type(config)())) | _flatten(stored)
        now = _flatten(dataclasses.asdict(config))
        before, now = (json.loads(json.dumps(settings)) for settings in (before, now))
        changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and k not in _MAY_CHANGE)
        if changed:
            was = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed)
            raise ValueError(f"run_dir: {str(self.path)!r} cannot be resumed with other settings: {was}")

    def claim(self, config: TrainingConfig) -> dict | None:
        """Make the folder this run's own. Raises RunError where another run took it since ``check``.

        Returns:
            when resuming, the newest checkpoint's state with its ``folder``, or None where the run was cut short before
            its first one and starts again; metrics of later steps are cut off.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not config.resume:
            try:
                _write(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2), replace=False)
            except FileExistsError:
                raise RunError(
                    f"run_dir: another run took {str(self.path)!r} while this one started; choose another --run-dir"
                ) from None
            return None
        self._clear_leftovers()
        newest = self.newest()
        state = json.loads((newest / _COMPLETE).read_text()) | {"folder": str(newest)} if newest else None
        metrics = self.path / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        kept = [line for line in lines if state and _step_of(line) <= state["step"]]
        _write(metrics, "".join(line + "\n" for line in kept))
        return state

    def _clear_leftovers(self) -> None:
        """Remove what a killed run was in the middle of writing."""
        for folder in self.path.glob("checkpoints/.step_*.partial"):
            shutil.rmtree(folder)
        for file in self.path.glob(".*.partial"):
            file.unlink()

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
        older = partial.with_name(f".{final.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        if final.exists():  # the same step saved again: the older one steps aside and goes once the new one stands
            os.replace(final, older)
        os.replace(partial, final)
        shutil.rmtree(older, ignore_errors=True)
        return final


def _flatten(config: dict, prefix: str = "") -> dict:
    """Nested settings by dotted name; a pass-through dict counts as one value."""
    flat = {}
    for key, value in config.items():
        nested = isinstance(value, dict) and key not in ("megatron", "vllm")
        flat |= _flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def _step_of(line: str) -> float:
    """Step of a metrics line; a line cut short by a kill counts as later than any checkpoint."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")


def _write(path: Path, text: str, replace: bool = True) -> None:
    """Write a file as a whole, and only once its contents are on disk.

    Raises:
        FileExistsError: it exists and is not to be replaced.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if replace:
        os.replace(partial, path)
        return
    try:
        os.link(partial, path)  # unlike a rename, this fails where the name is taken
    finally:
        partial.unlink()
