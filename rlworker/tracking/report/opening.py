"""The opening of a report: a run in five lines, and what failed."""

import shlex
from pathlib import Path
from typing import get_args

from rlworker.environments.record import FailureKind
from rlworker.tracking.report.record import RunRecord
from rlworker.tracking.report.tables import tabulate_scores

_REJECTED = "rejected"
"""Folder of a run with the rows of updates that were refused."""


def describe_run(run: RunRecord) -> list[tuple[str, str]]:
    """Describe a run in five lines, each a name and a text: model, task, steps, score and time."""
    score_name, score = describe_score(run)
    return [
        ("model", _describe_model(run)),
        ("task", _describe_task(run)),
        ("steps", _describe_steps(run)),
        (score_name, score),
        ("time", _describe_time(run)),
    ]


def describe_score(run: RunRecord) -> tuple[str, str]:
    """Describe how the run's first held-out score went; of a run without any, its reward or training loss.

    Returns:
        the name of the score, and its values before, after and at its best.
    """
    for name, (before, after, best, step) in tabulate_scores(run).items():
        return name, f"{before:.3g} → {after:.3g}, best {best:.3g} after step {step}"
    for name, sign in (("reward", 1), ("train_loss", -1)):
        values = [(line[name], line["step"]) for line in run.steps if name in line]
        if values:
            best, step = max(values, key=lambda pair: sign * pair[0])
            return name, f"{values[0][0]:.3g} → {values[-1][0]:.3g}, best {best:.3g} in step {step}"
    return "held-out", "not measured yet"


def list_failures(run: RunRecord, outages: int) -> list[str]:
    """List what failed in a run, each as a sentence; empty if nothing did."""
    failures = []
    for prefix, what in (("episode", "episodes of training"), ("heldout", "held-out episodes")):
        if total := _count(run, f"{prefix}_failures"):
            counts = {kind: _count(run, f"{prefix}_{kind}") for kind in get_args(FailureKind)}
            kinds = [f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count]
            failures.append(f"{total} {what} failed" + (f": {', '.join(kinds)}" if kinds else ""))
    for name, what in (("skipped_train", "training rows"), ("skipped_heldout", "held-out rows")):
        if count := _count(run, name):
            failures.append(f"{count} {what} were skipped, since they are too long or have bad images")
    if outages:
        failures.append(f"{outages} outage{'s' if outages > 1 else ''}: lost workers were replaced")
    if override := run.stored.get("rollout", {}).get("attention_override"):
        failures.append(f"rollouts are approximate: {', '.join(override)} did not honour the model's rule")
    if (run.folder / _REJECTED).is_dir():
        failures.append("an update was refused, since its numbers were not finite; rejected/ has its rows")
    return failures


def _count(run: RunRecord, metric: str) -> int:
    """Add a count up over the lines of a run."""
    return round(sum(line.get(metric, 0) for line in run.lines))


def _describe_model(run: RunRecord) -> str:
    models = run.starts[0].get("models", {}) if run.starts else {}
    return models.get("actor") or next(iter(models.values()), "") or str(run.stored.get("model", ""))


def _describe_task(run: RunRecord) -> str:
    """Name the recipe, which the command of the first start runs, and the rows."""
    words = shlex.split(run.starts[0].get("command", "")) if run.starts else []
    recipe = " ".join(words[1:3] if words[1:2] == ["-m"] else words[1:2]).removeprefix("-m ")
    rows = Path(str(run.stored.get("data", {}).get("train", ""))).name
    return " on ".join(filter(None, (recipe, rows))) or "not recorded"


def _describe_steps(run: RunRecord) -> str:
    done, of_all = run.last_step, run.stored.get("steps")
    text = f"{done:,} of {of_all:,}" if of_all else f"{done:,}"
    prompts, samples = run.stored.get("prompts_per_step"), run.stored.get("samples_per_prompt")
    if prompts and samples:
        text += f", of {prompts:,} prompts with {samples:,} samples each"
    elif rows := run.stored.get("rows_per_step"):
        text += f", of {rows:,} rows"
    return text


def _describe_time(run: RunRecord) -> str:
    if not run.steps:
        return "no step yet"
    seconds = run.measure_axes()["seconds"][-1]
    steady = run.steps[1:] or run.steps
    each = sum(line["time_step"] for line in steady) / len(steady)
    return f"{spell_seconds(seconds)}, {each:.3g} s a step"


def spell_seconds(seconds: float) -> str:
    """Spell a time to two units: ``"3 min 20 s"``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
