"""Tables of a page: a run's origin, settings and results, and the time of each phase."""

import math

from hardware.platform import describe
from hardware.platforms import get_platform
from rlworker.tracking.report.curves import PHASES, list_phases
from rlworker.tracking.report.record import RunRecord

_COUNTS = ("skipped_train", "skipped_heldout", "episode_failures")


def describe_origin(run: RunRecord) -> dict[str, str]:
    """Describe the origin of a run: its models, and the command, code, date and machine of its first start."""
    first = run.starts[0] if run.starts else {}
    models = first.get("models") or {"model": run.stored.get("model", "")}
    versions = ", ".join(f"{name} {version}" for name, version in first.get("versions", {}).items())
    names = ("command", "commit", "date", "platform", "device")
    origin = models | {name: first.get(name, "") for name in names} | {"versions": versions}
    return {name: text for name, text in origin.items() if text}


def tabulate_later_starts(run: RunRecord) -> list[tuple[int, str, str, str]]:
    """List step, date, commit and changed settings of each start after the first."""
    spell = lambda changes: ", ".join(f"{key} {before} to {now}" for key, (before, now) in changes.items())  # noqa: E731
    return [(one["step"], one["date"], one["commit"], spell(one.get("changed", {}))) for one in run.starts[1:]]


def summarise_run(run: RunRecord, outages: int) -> dict[str, str | float]:
    """Summarise a run: its platform, its steps, and the number of failures of each kind."""
    override = ", ".join(run.stored.get("rollout", {}).get("attention_override") or ())
    summary: dict[str, str | float] = {"platform": describe(get_platform(run.stored["platform"]))}
    summary |= {"rollouts": f"approximate: {override} did not honour the model's rule"} if override else {}
    summary |= {"outages": outages} if outages else {}
    counts = {name: count for name in _COUNTS if (count := sum(line.get(name, 0) for line in run.lines))}
    return summary | {"steps": run.last_step} | counts


def tabulate_scores(run: RunRecord) -> dict[str, tuple[float, float, float, int]]:
    """Return for each held-out metric its first value, last value, best value and the step of the best."""
    scores = {}
    for name, (_, kind) in run.scores.items():
        found = [(line[name], line["step"]) for line in run.lines if name in line]
        ordered = [pair for pair in found if not math.isnan(pair[0])] or found
        best = (min if kind == "loss" else max)(ordered, key=lambda pair: pair[0])
        scores[name] = (found[0][0], found[-1][0], *best)
    return scores


def tabulate_phases(steps: list[dict]) -> list[tuple[str, float, float]]:
    """List name, mean seconds and share of the step for each phase, with a last row for the rest of the step.

    The first step, which warms up, is left out if there are others. ``list_phases`` chooses the phases.
    """
    steady = steps[1:] or steps
    if not steady:
        return []
    total = sum(line["time_step"] for line in steady)
    add_up = lambda names: sum(line.get(name, 0.0) for line in steady for name in names)  # noqa: E731
    rows = [(name.removeprefix("time_"), add_up((name,))) for name in list_phases(steady)]
    if inside := add_up(("time_environment",)):
        place = next((at for at, (name, _) in enumerate(rows) if name == "rollout"), -1)
        rows.insert(place + 1, ("environments alone, within rollout", inside))
    rows.append(("other", total - add_up(PHASES)))
    return [(name, seconds / len(steady), seconds / total) for name, seconds in rows]


def tabulate_start(lines: list[dict]) -> list[tuple[str, float]]:
    """List the parts of a run's start with their seconds; empty for a run without its first lines."""
    if len(lines) < 2 or "time_start_trainers" not in lines[0]:
        return []
    first, then = lines[0], lines[1]
    engines = [name for name in ("trainers", "rollouts") if f"time_start_{name}" in first]
    rows = [(f"start {name}", first[f"time_start_{name}"]) for name in engines]
    rows += [("evaluate", first.get("time_evaluate", 0.0)), ("first step", then["time_step"])]
    before = then["time_wall"] - then.get("time_evaluate", 0.0) - sum(seconds for _, seconds in rows)
    whole = ("from the start of the program", then["time_wall"])
    return [("program, data, Ray, and all that came before", before), *rows, whole]
