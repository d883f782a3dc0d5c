"""Read a run folder, for the pages that show the run."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import rlworker
from rlworker.config.command_line import flatten, flatten_config
from rlworker.config.run import RunConfig
from rlworker.tracking.log import read_metrics
from rlworker.tracking.run_folder import OUTAGES
from rlworker.tracking.step_lines import VALIDATIONS

_SCORE = re.compile(r"heldout(?:/(?P<set>[^/_]+))?(?:[/_](?P<kind>loss|(?:mean|pass|maj)_at_\d+))?")
"""Name of a score of held-out rows: ``heldout``, ``heldout_loss``, ``heldout/aime_pass_at_8``."""
_OF_EACH_START = ("run_dir", "resume")
"""Settings that belong to a start and not to the run."""


@dataclass(frozen=True)
class RunRecord:
    """A run's settings, starts and metrics.

    Attributes:
        folder: the run folder.
        stored: content of ``config.json``.
        starts: lines of ``starts.jsonl``, the oldest first.
        lines: lines of ``metrics.jsonl``, the first for step 0.
    """

    folder: Path
    stored: dict
    starts: list[dict]
    lines: list[dict]

    @property
    def steps(self) -> list[dict]:
        """The lines of the steps that were taken, without that of step 0."""
        return [line for line in self.lines if "time_step" in line]

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics that any line has, in the order of their first appearance."""
        names: dict[str, None] = {}
        for line in self.lines:
            if line.keys() - names.keys():
                names |= dict.fromkeys(name for name, value in line.items() if isinstance(value, int | float))
        return list(names)

    @cached_property
    def scores(self) -> dict[str, tuple[str, str]]:
        """Name of a held-out metric -> set and kind: ``heldout/aime_pass_at_8`` -> ``("aime", "pass@8")``."""
        found = {name: match for name in self.metrics if (match := _SCORE.fullmatch(name))}
        return {
            name: (match["set"] or "", (match["kind"] or "greedy").replace("_at_", "@"))
            for name, match in found.items()
        }

    @property
    def last_step(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    def list_settings(self) -> dict:
        """Return all settings of the run by dotted key; a setting that was not stored has its default."""
        return _drop_starts(self._list_defaults() | flatten(self.stored))

    def list_own_settings(self) -> dict:
        """Return the settings that differ from their defaults, and those that only the run's recipe has."""
        defaults = json.loads(json.dumps(self._list_defaults()))
        stored = flatten(self.stored)
        return _drop_starts({key: value for key, value in stored.items() if defaults.get(key, ...) != value})

    def _list_defaults(self) -> dict:
        if "rollout" in self.stored:
            return flatten_config(RunConfig())
        return flatten_config(rlworker.SftConfig())

    def measure_axes(self) -> dict[str, list[float]]:
        """Return the position of each line on the axes of a curve: ``step``, ``tokens`` and ``seconds``.

        Seconds add up steps, evaluations and checkpoints, but not starts.
        """
        tokens = (line.get("tokens_per_second", 0.0) * line.get("time_step", 0.0) for line in self.lines)
        parts = ("time_step", "time_evaluate", "time_save")
        seconds = (sum(line.get(part, 0.0) for part in parts) for line in self.lines)
        return {
            "step": [line["step"] for line in self.lines],
            "tokens": [round(count) for count in accumulate(tokens)],
            "seconds": [round(count, 1) for count in accumulate(seconds)],
        }


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        ValueError: the folder holds no run.
    """
    if not (folder / "metrics.jsonl").is_file() or not (folder / "config.json").is_file():
        raise ValueError(
            f"report: {str(folder)!r} is not a run folder, which has config.json and metrics.jsonl; name a --run-dir"
        )
    stored = json.loads((folder / "config.json").read_text())
    return RunRecord(folder, stored, _read_lines(folder / "starts.jsonl"), read_metrics(folder))


def read_validations(folder: Path) -> list[tuple[int, list[dict]]]:
    """Read the first and the last validation of a run: step and table of each, as ``Validation.table``."""
    lines = _read_lines(folder / VALIDATIONS)
    return [(line["step"], line["table"]) for line in (lines[:1] + lines[-1:] if lines[1:] else lines)]


def read_outages(folder: Path) -> list[tuple[str, str]]:
    """Read the outages of a run: for each the place in the run, and how each worker was lost."""
    lines = _read_lines(folder / OUTAGES)
    return [(line["where"], ", ".join(f"{name} {fate}" for name, fate in line["lost"].items())) for line in lines]


def _drop_starts(settings: dict) -> dict:
    return {key: value for key, value in settings.items() if key not in _OF_EACH_START}


def _read_lines(path: Path) -> list[dict]:
    """Read the whole lines of a file; none where it is not there."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] if path.is_file() else []
