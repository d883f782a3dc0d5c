"""compare.html: the settings that differ between runs, their curves in one plot, their samples side by side."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rlworker.tracking.log import name_samples
from rlworker.tracking.report.curves import choose_curves, make_plots
from rlworker.tracking.report.page import render_page, write_page
from rlworker.tracking.report.record import RunRecord, read_run
from rlworker.tracking.report.samples import list_sampled_steps, show_sample
from rlworker.tracking.report.tables import describe_origin, tabulate_scores

_MOST_STEPS = 3
"""Number of steps of which samples are shown: the first and the last steps that all runs have."""
_MOST_SAMPLES = 5
"""Most samples of a step that are shown."""
Table = list[tuple[str, list[str]]]
"""Rows, each a name and the values of all runs."""


def write_comparison(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write a page that compares runs, and return its path.

    Args:
        folders: run folders.
        output: file of the page; None takes ``compare.html`` in the folder of the first run.

    Raises:
        ValueError: fewer than two folders are named, a folder holds no run, or plotly is not installed.
    """
    if len(folders) < 2:
        raise ValueError(
            f"compare: {len(folders)} run is named, expected two or more; name further run folders, or show one run "
            "with: rlworker report FOLDER"
        )
    runs = dict(zip(_name_runs(folders), map(read_run, folders), strict=True))
    records = list(runs.values())
    curves, at_rest = choose_curves(records)
    html = render_page(
        "compare.html.j2",
        f"rlworker compare {' '.join(map(str, folders))}",
        data=make_plots(runs, curves),
        names=list(runs),
        origin=_tabulate(records, describe_origin, differing=True),
        settings=_tabulate(records, RunRecord.list_settings, differing=True),
        results=_tabulate(records, list_results, differing=False),
        at_rest=at_rest,
        samples=pair_samples(folders, min(run.last_step for run in records)),
    )
    return write_page(output or folders[0] / "compare.html", html)


def _name_runs(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders, with the path to them where the names alone are not unique."""
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    paths = [str(folder) for folder in folders]
    return [f"{path} ({place})" if paths.count(path) > 1 else path for place, path in enumerate(paths, 1)]


def list_results(run: RunRecord) -> dict[str, int | str]:
    """List the results of a run: steps, tokens, seconds, last reward, and first, last and best held-out scores."""
    ends = {axis: round(places[-1]) for axis, places in run.measure_axes().items() if places}
    results: dict[str, int | str] = {"steps" if axis == "step" else axis: end for axis, end in ends.items()}
    if rewards := [line["reward"] for line in run.lines if "reward" in line]:
        results["reward of the last step"] = f"{rewards[-1]:.5g}"
    for name, (before, after, best, step) in tabulate_scores(run).items():
        results[name] = f"{before:.4g} to {after:.4g}, best {best:.4g} at step {step}"
    return results


def _tabulate(runs: Sequence[RunRecord], list_values: Callable[[RunRecord], dict], differing: bool) -> Table:
    columns = [{name: _spell(value) for name, value in list_values(run).items()} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, "-") for column in columns]) for name in names]
    return [(name, values) for name, values in rows if not differing or len(set(values)) > 1]


def _spell(value) -> str:
    """Spell a value with all its digits, so that values which differ are spelled otherwise."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return value if isinstance(value, str) else json.dumps(value)


def pair_samples(folders: Sequence[Path], last: int) -> list[dict]:
    """Pair the samples that all runs have kept of the same steps, up to step ``last``.

    Samples of the same prompt are paired if runs have prompts in common, else samples at the same position.

    Returns:
        for each step ``number`` and ``rows``, each row with ``prompt`` (empty if the prompts differ) and ``samples``,
            one per run.
    """
    common = set.intersection(*(set(list_sampled_steps(folder)) for folder in folders))
    numbers = sorted(number for number in common if number <= last)
    steps = []
    for number in dict.fromkeys([*numbers[:1], *numbers[1:][1 - _MOST_STEPS :]]):
        files = [name_samples(folder, number) for folder in folders]
        of_runs = [[json.loads(line) for line in file.open(encoding="utf-8")] for file in files]
        by_prompt = [{sample["prompt"]: sample for sample in reversed(samples)} for samples in of_runs]
        prompts = [prompt for prompt in by_prompt[0] if all(prompt in samples for samples in by_prompt)][::-1]
        rows = [(prompt, [samples[prompt] for samples in by_prompt]) for prompt in prompts]
        rows = (rows or [("", list(row)) for row in zip(*of_runs)])[:_MOST_SAMPLES]
        shown = [{"prompt": prompt, "samples": list(map(show_sample, samples))} for prompt, samples in rows]
        steps.append({"number": number, "rows": shown})
    return steps
