"""What a run tells: metrics.jsonl, trackers, sampled rollouts, a progress bar and one line per step."""

import json
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
from tqdm import tqdm

from rlworker.trackers import Trackers

_LINE = (
    ("reward", "reward", "6.3f"),
    ("heldout", "heldout", "6.3f"),
    ("|dlogp|", "logprob_diff_mean", "8.1e"),
    ("entropy", "entropy", "6.3f"),
    ("clip", "clip_fraction", "5.3f"),
    ("gnorm", "grad_norm", "6.3f"),
    ("len", "completion_tokens", "5.1f"),
    ("tok/s", "tokens_per_second", "6.0f"),
    ("s", "time_step", "5.2f"),
)
"""Fields of a step's line: label, metric, format. A metric that a step lacks leaves its place blank."""


class StepClock:
    """Wall seconds of a step by phase."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str):
        start = time.perf_counter()
        yield
        self.seconds[f"time_{name}"] = self.seconds.get(f"time_{name}", 0.0) + time.perf_counter() - start

    def total(self) -> dict[str, float]:
        return self.seconds | {"time_step": time.perf_counter() - self._start}


class RunLog:
    """Writes one JSON line per step, passes it on to the trackers and shows the run on the terminal.

    Args:
        steps: of the whole run. first_step: steps done so far.
        trackers: open ones; they are closed with this.
    """

    def __init__(self, folder: Path, steps: int, first_step: int, trackers: Trackers):
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")
        self._rollouts = folder / "rollouts"
        self._rollouts.mkdir(exist_ok=True)
        self._bar = tqdm(total=steps, initial=first_step, unit="step", dynamic_ncols=True, disable=None)
        self._steps = steps
        self._trackers = trackers

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record step ``step`` (steps done so far), with the seconds since this process started (``time_wall``)."""
        metrics = metrics | {"time_wall": time.time() - psutil.Process().create_time()}
        self._metrics.write(json.dumps({"step": step} | metrics) + "\n")
        self._metrics.flush()
        self._trackers.step(step, metrics)
        fields = (f"{label} {format(metrics[key], form) if key in metrics else ''}" for label, key, form in _LINE)
        self._bar.write(f"step {step:4d}/{self._steps}  " + "  ".join(fields))
        self._bar.n = step
        self._bar.refresh()

    def rollouts(self, step: int, rows: list[dict]) -> None:
        """Keep some samples of a step."""
        with open(self._rollouts / f"step_{step:06d}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def note(self, text: str) -> None:
        self._bar.write(text)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        self._metrics.close()
        self._trackers.close()


def read_metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; the last one of a killed run may be cut short and is left out."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
