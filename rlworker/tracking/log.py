"""The log of a run: metrics.jsonl, trackers, sampled rollouts, a progress bar and one line per step on the terminal."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from rlworker.base.terminal import LOGGER, read_process_age
from rlworker.tracking.step_lines import METRICS, PROMPTS, VALIDATIONS, read_line, spell_line
from rlworker.tracking.trackers import Trackers

HELDOUT = "heldout"
"""Label of the held-out score on a step's line, and the beginning of the names of all held-out metrics."""
RL_LINE = (
    ("reward", "reward", "6.3f"),
    ("spread", "reward_std", "5.3f"),
    (HELDOUT, "heldout", "6.3f"),
    ("|dlogp|", "logprob_diff_mean", "7.1e"),
    ("kl", "kl", "7.1e"),
    ("policy-kl", "policy_kl", "7.1e"),
    ("entropy", "entropy", "5.3f"),
    ("clip", "clip_fraction", "5.3f"),
    ("ratio", "ratio_max", "5.2f"),
    ("gnorm", "grad_norm", "6.3f"),
    ("lr", "lr", "7.1e"),
    ("zerovar", "zero_variance_share", "4.0%"),
    ("trunc", "truncated", "4.0%"),
    ("len", "completion_tokens", "5.1f"),
    ("tok/s", "tokens_per_second", "5.0f"),
    ("flop/s", "flops_per_second", "7.1e"),
    ("GB", "memory_gb", "4.1f"),
    ("s", "time_step", "5.2f"),
)
"""Columns of a step's line on the terminal: label, metric and format. A metric is left out until a step has it; after
that it is blank in steps without it."""
SUPERVISED_LINE = (
    ("loss", "train_loss", "6.3f"),
    (HELDOUT, "heldout_loss", "6.3f"),
    ("gnorm", "grad_norm", "6.3f"),
    ("lr", "lr", "7.1e"),
    ("tok/s", "tokens_per_second", "5.0f"),
    ("flop/s", "flops_per_second", "7.1e"),
    ("GB", "memory_gb", "4.1f"),
    ("s", "time_step", "5.2f"),
)
"""Columns of a step's line of supervised training."""
_ONE_NUMBER = 4
"""Number of entries in a row of a validation's table that has one metric: set, source, rows and the metric."""
_RECENT = 50
"""Number of last steps from which the remaining time is estimated; they should include an evaluation or two."""


def is_due(step: int, every: int) -> bool:
    """Tell whether an action that is taken every ``every`` steps is due after this step; 0 means never."""
    return bool(every) and step % every == 0


class StepClock:
    """Measures the seconds of a step's phases: ``phase(name)`` adds to ``time_{name}``."""

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
    """Writes one JSON line per step, passes it on to the trackers, and shows the run on the terminal.

    Args:
        folder: the run folder.
        steps: number of steps of the whole run. first_step: number of steps done so far.
        trackers: open trackers, which are closed with the log.
        line: columns of a step's line on the terminal.
        draw: writes the report of a run folder and returns where it lies; it is called after each line with an
            evaluation.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        first_step: int,
        trackers: Trackers,
        line: Sequence = RL_LINE,
        draw: Callable[[Path], str] | None = None,
    ):
        self._path, self._prompts = folder / METRICS, folder / PROMPTS
        self._metrics = open(self._path, "a", encoding="utf-8")
        self._folder = folder
        self._bar = tqdm(total=steps, initial=first_step, unit="step", dynamic_ncols=True, disable=None)
        self._steps = steps
        self._trackers, self._line, self._draw = trackers, line, draw
        self._had: set[str] = set()  # metrics
        self._told: deque[tuple[float, int]] = deque(maxlen=_RECENT + 1)  # when which step was told
        self._tracked = first_step - 1  # the last step that trackers have

    def go_back(self, step: int) -> None:
        """Continue after ``step``, to which metrics.jsonl was cut. Trackers do not get repeated steps again."""
        self._metrics.close()
        self._metrics = open(self._path, "a", encoding="utf-8")
        self._told.clear()
        self._bar.n = step
        self._bar.refresh()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of step ``step``, and ``time_wall``, the age of this process in seconds."""
        metrics = metrics | {"time_wall": read_process_age()}
        self._metrics.write(spell_line({"step": step} | metrics))
        self._metrics.flush()
        if step > self._tracked:
            self._trackers.step(step, metrics)
            self._tracked = step
        self._had |= metrics.keys()
        fields = []
        for label, key, form in self._line:
            if key in self._had:
                blanks = " " * int(form.partition(".")[0])  # of a metric that this step has not
                fields.append(f"{label} {format(metrics[key], form) if key in metrics else blanks}")
        time_left = self._estimate_left(step, metrics.get("time_step"))
        LOGGER.info(f"step {step:4d}/{self._steps}  " + "  ".join(fields) + f"  left {time_left}")
        self._bar.n = step
        self._bar.refresh()
        if "time_evaluate" in metrics:
            self.draw_report(logging.DEBUG)

    def draw_report(self, level: int = logging.INFO) -> None:
        """Draw the report of the run folder, and log where it lies. A page that fails is a warning: the run is worth
        more."""
        try:
            if self._draw:
                LOGGER.log(level, self._draw(self._folder))
        except Exception as error:
            LOGGER.warning(f"report: it could not be drawn, and the run goes on: {type(error).__name__}: {error}")

    def prompts(self, step: int, first: int, rows: list[int]) -> None:
        """Record the numbers of a step's rows in order, and ``first``, the number of the step's first rollout."""
        with open(self._prompts, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "first_rollout": first, "rows": rows}) + "\n")

    def validation(self, step: int, table: list[dict]) -> None:
        """Record the table of a validation after step ``step``, and show it if it has more than one metric."""
        with open(self._folder / VALIDATIONS, "a", encoding="utf-8") as file:
            file.write(spell_line({"step": step, "table": table}))
        if len(table) > 1 or len(table[0]) > _ONE_NUMBER:
            LOGGER.info(format_table(table))

    def rollouts(self, step: int, rows: list[dict]) -> None:
        """Write samples of a step, as ``describe_trajectory`` makes them, into the run folder."""
        path = name_samples(self._folder, step)
        path.parent.mkdir(exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:  # JSON's escapes
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _estimate_left(self, step: int, seconds: float | None) -> str:
        """Estimate the time to the last step from this process's last steps, with evaluations and saves; at first from
        the first step alone (``seconds``)."""
        self._told.append((time.monotonic(), step))
        (begin, first), (end, _) = self._told[0], self._told[-1]
        each = (end - begin) / (step - first) if step > first else seconds
        if each is None:
            return ""
        minutes, rest = divmod(round((self._steps - step) * each), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._bar.close()
        self._trackers.close()
        with suppress(OSError) if kind else nullcontext():  # a full disk refuses again a line that has ended the run
            self._metrics.close()


def make_cells(table: list[dict]) -> list[list[str]]:
    """Format the table of a validation as cells: a row of titles, then a row for each held-out set and each of its
    sources.

    Args:
        table: ``Validation.table``.
    """
    table = [line | {"set": line["set"] or HELDOUT} for line in table]
    keys = [key for key in dict.fromkeys(chain(*table)) if any(line.get(key, "") != "" for line in table)]
    values = [[line.get(key, "") for key in keys] for line in table]
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in line] for line in values]
    return [[key.replace("_at_", "@") for key in keys], *cells]


def format_table(table: list[dict]) -> str:
    """Format the results of a validation as text in columns, for the terminal.

    Args:
        table: ``Validation.table``, one dict for each held-out set and source, with the keys ``set``, ``source``,
            ``rows`` and one for each metric. A missing key leaves its cell empty.
    """
    cells = make_cells(table)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(f"  {line}" for line in lines)


def name_samples(folder: Path, step: int) -> Path:
    """Return the path of the file in a run folder that holds samples of step ``step``."""
    return folder / "rollouts" / f"step_{step:06d}.jsonl"


def read_metrics(folder: Path) -> list[dict]:
    """Read the lines of a run's metrics.jsonl as dicts, with NaN for null; a last line that a kill cut short is left
    out."""
    lines = (folder / METRICS).read_text(encoding="utf-8").split("\n")
    return [read_line(line) for line in lines[:-1]]
