"""report.html: curves, times and samples of a run, in one file without external resources."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader

from hardware.platform import describe
from hardware.platforms import get_platform
from rlworker.tracking.log import make_cells, name_samples, read_metrics
from rlworker.tracking.run_folder import OUTAGES
from rlworker.tracking.step_lines import VALIDATIONS

if TYPE_CHECKING:  # a run can do without plotly
    from plotly.graph_objects import Figure

_THUMBNAIL = 160
"""Pixels of a shown image's longer side."""
_PHASES = (
    "time_rollout",
    "time_greedy",
    "time_logprobs",
    "time_values",
    "time_update",
    "time_sync",
    "time_canary",
)

_PLOT = {"responsive": True, "displayModeBar": False}

_CURVES = (
    ("Loss (nats per token)", {"train_loss": "training", "heldout_loss": "held-out rows"}, "linear"),
    ("Reward", {"reward": "sampled, training prompts", "heldout": "greedy, held-out prompts"}, "linear"),
    (
        "Rollout against trainer: |difference of logprobs|",
        {"logprob_diff_mean": "mean of a step", "logprob_diff_max": "largest token"},
        "log",
    ),
    ("Entropy (nats per token)", {"entropy": "entropy"}, "linear"),
    ("Gradient norm before clipping", {"grad_norm": "gradient norm"}, "linear"),
    ("Completion length (tokens)", {"completion_tokens": "mean length"}, "linear"),
    ("Age of tokens (updates)", {"token_age_mean": "mean of a step", "token_age_max": "oldest token"}, "linear"),
    ("Engines without anything to sample (seconds of a step)", {"engine_idle_seconds": "mean"}, "linear"),
    ("Samples alive at an update", {"samples_at_update": "samples"}, "linear"),
    ("Turns of an episode", {"turns": "turns", "forks": "forks", "tool_calls": "tool calls"}, "linear"),
)
"""Title, metric -> label, scale of each plot."""


def format_report(folder: Path) -> str:
    """Draw the report and return a text with its path, or without plotly the package to install: the run goes on."""
    return _find_missing_package(folder) or f"report: {write_report(folder)}"


def write_report(folder: Path) -> Path:
    """Draw a run folder's metrics and samples into ``report.html`` and return its path.

    Raises:
        ValueError: the folder holds no run, or plotly is not installed.
    """
    if not (folder / "metrics.jsonl").is_file() or not (folder / "config.json").is_file():
        raise ValueError(f"report: {str(folder)!r} is not a run folder (it needs config.json and metrics.jsonl)")
    if missing := _find_missing_package(folder):
        raise ValueError(missing)
    from plotly.offline import get_plotlyjs

    stored = json.loads((folder / "config.json").read_text())
    lines = read_metrics(folder)
    steps = [line for line in lines if "time_step" in line]
    has_turns = any(line.get("turns", 1) != 1 for line in lines)  # else that plot is a line at 1
    curves = [curve for curve in _CURVES if has_turns or "turns" not in curve[1]]
    plots = [_draw_curves(title, lines, names, scale) for title, names, scale in curves]
    plots.append(_draw_time_split(steps))
    override = ", ".join(stored.get("rollout", {}).get("attention_override") or ())
    summary, outages = folder / "summary.json", _read_outages(folder)
    page = Environment(loader=PackageLoader("rlworker.tracking", "."), autoescape=True).get_template("report.html.j2")
    html = page.render(
        name=folder.name,
        summary={"platform": describe(get_platform(stored["platform"]))}
        | ({"rollouts": f"approximate: {override} did not honour the model's rule"} if override else {})
        | ({"outages": len(outages)} if outages else {})
        | (json.loads(summary.read_text()) if summary.is_file() else _summarise_run(lines)),
        plots=[plot.to_html(full_html=False, include_plotlyjs=False, config=_PLOT) for plot in plots if plot],
        phases=_tabulate_phases(steps),
        start=_tabulate_start(lines),
        samples=_read_samples(folder, lines[-1]["step"] if lines else 0),
        outages=outages,
        validations=_read_validations(folder),
        config=json.dumps(stored, indent=2),
        plotlyjs=get_plotlyjs(),
    )
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")  # samples may have halves of surrogates
    return path


def _find_missing_package(folder: Path) -> str:
    if find_spec("plotly"):
        return ""
    return f"report: plotly, which draws it, is not installed; pip install plotly, then: rlworker report {folder}"


def _set_layout(figure: Figure, title: str, **options) -> Figure:
    legend = dict(orientation="h", yanchor="bottom", y=1.0, xanchor="left", x=0)
    margin = dict(l=60, r=20, t=70, b=40)
    look = dict(template="plotly_white", height=340, margin=margin, legend=legend, title_y=0.97)
    figure.update_layout(title=title, **look, **options)
    figure.update_xaxes(title="step")
    return figure


def _draw_curves(title: str, lines: list[dict], names: dict[str, str], scale: str) -> Figure | None:
    from plotly.graph_objects import Figure

    figure, line_count = Figure(), 0
    for name, label in names.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            steps, values = zip(*points)
            few = len(points) < len(lines) / 2
            figure.add_scatter(x=steps, y=values, name=label, mode="lines+markers" if few else "lines")
            line_count += 1
    if not line_count:
        return None
    figure.update_yaxes(type=scale, exponentformat="e" if scale == "log" else "none")
    return _set_layout(figure, title, showlegend=line_count > 1)


def _draw_time_split(steps: list[dict]) -> Figure | None:
    from plotly.graph_objects import Figure

    if not steps:
        return None
    figure = Figure()
    for phase in _PHASES:
        label = phase.removeprefix("time_")
        figure.add_scatter(
            x=[s["step"] for s in steps],
            y=[s.get(phase, 0.0) for s in steps],
            name=label,
            stackgroup="time",
            mode="lines",
        )
    return _set_layout(figure, "Seconds of a step by phase")


def _tabulate_phases(steps: list[dict]) -> list[tuple[str, float, float]]:
    """Tabulate phase, mean seconds and share of the step; the first step, which warms up, is left out where there are
    others."""
    steady = steps[1:] or steps
    if not steady:
        return []
    total = sum(s["time_step"] for s in steady)
    rows = [(phase.removeprefix("time_"), sum(s.get(phase, 0.0) for s in steady)) for phase in _PHASES]
    rows.append(("other", total - sum(seconds for _, seconds in rows)))
    return [(name, seconds / len(steady), seconds / total) for name, seconds in rows]


def _tabulate_start(lines: list[dict]) -> list[tuple[str, float]]:
    """Tabulate the phases of a run's start, in seconds; empty for a run without its first lines."""
    if len(lines) < 2 or "time_start_trainers" not in lines[0]:
        return []
    first, then = lines[0], lines[1]
    engines = [name for name in ("trainers", "rollouts") if f"time_start_{name}" in first]
    rows = [(f"start {name}", first[f"time_start_{name}"]) for name in engines]
    rows += [("evaluate", first.get("time_evaluate", 0.0)), ("first step", then["time_step"])]
    before = then["time_wall"] - then.get("time_evaluate", 0.0) - sum(seconds for _, seconds in rows)
    whole = ("from the start of the program", then["time_wall"])
    return [("program, data, Ray, and all that came before", before), *rows, whole]


def _summarise_run(lines: list[dict]) -> dict:
    ends = {}
    for name in ("heldout", "heldout_loss"):
        if scores := [line[name] for line in lines if name in line]:
            ends |= {f"{name}_before": scores[0], f"{name}_after": scores[-1]}
    names = ("skipped_train", "skipped_heldout", "episode_failures")
    counts = {name: count for name in names if (count := sum(line.get(name, 0) for line in lines))}
    return ends | {"steps": lines[-1]["step"] if lines else 0} | counts


def _read_outages(folder: Path) -> list[tuple[str, str]]:
    """Read the outages of a run: the place in the run, and the fate of each lost worker."""
    path = folder / OUTAGES
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    return [(line["where"], ", ".join(f"{name} {fate}" for name, fate in line["lost"].items())) for line in lines]


def _read_validations(folder: Path) -> list[tuple[int, list[list[str]]]]:
    """Read the tables of the first and the last validation: the step, and the cells of each line, the titles' first."""
    path = folder / VALIDATIONS
    whole = path.read_text("utf-8").split("\n")[:-1] if path.is_file() else []  # the last may be cut short
    lines = [json.loads(line) for line in whole]
    return [(line["step"], make_cells(line["table"])) for line in (lines[:1] + lines[-1:] if lines[1:] else lines)]


def _read_samples(folder: Path, last: int) -> list[dict]:
    """Read the kept samples of the first and last steps up to ``last``: those of one turn, and episodes turn by turn.

    A run that has gone back to a checkpoint may have files of later steps, which it has not come to again.
    """
    numbers = sorted(int(file.stem.removeprefix("step_")) for file in (folder / "rollouts").glob("step_*.jsonl"))
    numbers, steps = [number for number in numbers if number <= last], []
    for number in numbers if len(numbers) <= 6 else [*numbers[:2], *numbers[-4:]]:
        file = name_samples(folder, number)
        samples = [_show_sample(json.loads(line)) for line in file.open(encoding="utf-8")]
        episodes = [sample for sample in samples if sample["turns"]]
        completions = [sample for sample in samples if not sample["turns"]]
        steps.append({"number": number, "completions": completions, "episodes": episodes})
    return steps


def _show_sample(sample: dict) -> dict:
    """Return a sample with its images, and the images of its turns, as thumbnails for the page."""
    turns = [turn | {"thumbnails": _make_thumbnails(turn.get("images", ()))} for turn in sample.get("turns", ())]
    images = () if turns else sample.get("images", ())  # an episode shows them in the turns that they came in
    return sample | {"thumbnails": _make_thumbnails(images), "turns": turns}


def _make_thumbnails(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Pair each path with its image as data, which is empty where the file is gone."""
    if not paths:
        return []
    from PIL import Image as PILImage  # runs without images load neither

    from engines.images.decoding import DECODING_ERRORS, convert_to_rgb

    thumbnails = []
    for path in paths:
        try:
            with PILImage.open(path) as image:
                small, data = convert_to_rgb(image), io.BytesIO()
                small.thumbnail((_THUMBNAIL, _THUMBNAIL))
                small.save(data, "PNG")
            thumbnails.append((path, f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"))
        except DECODING_ERRORS:
            thumbnails.append((path, ""))
    return thumbnails
