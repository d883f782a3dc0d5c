"""report.html: result, advice, curves, samples and settings of a run. The library that draws them lies beside it."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from rlworker.tracking.log import make_cells
from rlworker.tracking.report.advice import Advice, advise
from rlworker.tracking.report.curves import choose_curves, make_plots
from rlworker.tracking.report.opening import describe_run, list_failures
from rlworker.tracking.report.record import read_outages, read_run, read_validations
from rlworker.tracking.report.samples import read_samples
from rlworker.tracking.report.tables import (
    describe_origin,
    summarise_run,
    tabulate_later_starts,
    tabulate_phases,
    tabulate_scores,
    tabulate_start,
)
from rlworker.tracking.step_lines import write_whole

LIBRARY = "plotly.min.js"
"""File with the library that draws curves; pages in the same folder share it."""


def format_report(folder: Path) -> str:
    """Write the report and return a text with its path. Without plotly, return a text that says what to install."""
    return _find_missing_package(f"rlworker report {folder}") or f"report: {write_report(folder)}"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the files of a run folder, and return its path.

    Raises:
        ValueError: the folder holds no run, or plotly is not installed.
    """
    return write_page(folder / "report.html", render_report(folder))


def render_report(folder: Path, follows: str = "") -> str:
    """Render the report of a run folder as HTML; nothing is written.

    Args:
        folder: the run folder.
        follows: version of the run, for a page that is served and follows the run; empty for a page that does not.

    Raises:
        ValueError: the folder holds no run, or plotly is not installed.
    """
    run, outages = read_run(folder), read_outages(folder)
    curves, at_rest = choose_curves([run])
    data = make_plots({folder.absolute().name: run}, curves)
    summary = folder / "summary.json"
    return render_page(
        "report.html.j2",
        f"rlworker report {folder}",
        data=data,
        follows=follows,
        name=folder.absolute().name,
        lines=describe_run(run),
        failures=list_failures(run, len(outages)),
        advice=_place_advice(advise(run), data["plots"]),
        summary=summarise_run(run, len(outages)) | (json.loads(summary.read_text()) if summary.is_file() else {}),
        scores=tabulate_scores(run),
        validations=[(step, make_cells(table)) for step, table in read_validations(folder)],
        origin=describe_origin(run),
        later_starts=tabulate_later_starts(run),
        own_settings=run.list_own_settings(),
        at_rest=at_rest,
        phases=tabulate_phases(run.steps),
        start=tabulate_start(run.lines),
        samples=read_samples(folder, run.last_step),
        outages=outages,
        config=json.dumps(run.stored, indent=2),
    )


def _place_advice(advice: list[Advice], plots: list[dict]) -> list[dict]:
    """Return each advice as a dict, with ``plot``: the number of the plot that shows it, None where none does."""
    placed = []
    for item in advice:
        numbers = [number for number, plot in enumerate(plots) if not plot["lines"].keys().isdisjoint(item.metrics)]
        placed.append(asdict(item) | {"plot": min(numbers, default=None)})
    return placed


def render_page(template: str, again: str, *, data: dict, **parts: Any) -> str:
    """Render a page of plots as HTML.

    Args:
        template: name of the template, a file in templates/.
        again: the command that writes the page, for the message if plotly is missing.
        data: result of ``make_plots``. parts: further variables of the template.

    Raises:
        ValueError: plotly is not installed.
    """
    if missing := _find_missing_package(again):
        raise ValueError(missing)
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # a script ends at </
    templates = Environment(loader=PackageLoader("rlworker.tracking.report", "templates"), autoescape=True)
    html = templates.get_template(template).render(data=packed, library=LIBRARY, plots=data["plots"], **parts)
    # Samples may have halves of surrogates.
    return html.encode("utf-8", "xmlcharrefreplace").decode()


def write_page(path: Path, html: str) -> Path:
    """Write a page of plots, and beside it the library that draws them; returns the path of the page.

    Args:
        path: file of the page; its folder is made. html: the page, from ``render_page``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (library := path.with_name(LIBRARY)).is_file():
        write_whole(library, read_library())
    write_whole(path, html)
    return path


def read_library() -> str:
    """Read the source of the library that draws curves."""
    from plotly.offline import get_plotlyjs  # it takes a fifth of a second, once in a folder

    return get_plotlyjs()


def _find_missing_package(again: str) -> str:
    if find_spec("plotly"):
        return ""
    return f"report: plotly, which draws it, is not installed; pip install plotly, then: {again}"
