"""Write the tables of the docs from stored results, or say where a page does not hold what they give.

    python scripts/tables.py                          # write the tables of docs/*.md
    python scripts/tables.py --check                  # exit status 1 where a page says otherwise
    python scripts/tables.py add SOURCE --name NAME   # store a result as docs/results/NAME.json

SOURCE is a run folder, or a file that a benchmark's ``--json`` or pytest's ``--costs`` or ``--measured`` wrote. A page
says where a table stands and which results are its rows; ``*`` in a name stands for anything:

    <!-- table: demo_seed* demo_shuffled -->
    <!-- end -->

``table: families of`` before the names shows where each family trains and rolls out, by the capability tables and by
what these results have of it.
"""

import argparse
import difflib
import fnmatch
import json
import re
import statistics
import sys
import textwrap
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
NEEDED = ("command", "commit", "date", "platform", "device")
FIELDS = (*NEEDED, "note")
"""Fields that head a table: one that its results do not share becomes a column."""
BEGIN, END = "<!-- table: ", "<!-- end -->"
TABLE = re.compile(rf"({BEGIN}(.+?) -->\n)(.*?)({END})", re.DOTALL)
WIDTH = 100
FAMILIES = "families of "
KINDS = {"vllm": "vLLM processes", "rank": "ranks", "torch": "heavy Python starts", "unwatched": "unwatched Python"}
"""Process starts that the suite counts -> title of their column."""


@dataclass(frozen=True)
class Result:
    """One measurement: a head of ``FIELDS`` and rows of a table, each column's title -> value."""

    head: dict[str, str]
    rows: list[dict[str, Any]]


def check_result(source: Path, stored: dict[str, Any]) -> Result:
    """Check a stored result, and return it.

    Raises:
        ValueError: it lacks what a table needs, or was measured at sizes that only show that a program runs.
    """
    head, rows = stored.get("head", {}), stored.get("rows", [])
    if missing := [field for field in NEEDED if not head.get(field)]:
        raise ValueError(f"{source}: its head lacks {', '.join(missing)}; give add --{missing[0]} and the like")
    if "--tiny" in head["command"].split():
        raise ValueError(f"{source}: it was measured with --tiny, which tells nothing; measure again without")
    if not rows:
        raise ValueError(f"{source}: it has no rows; measure again by its command")
    return Result(head, rows)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read: {error}; name what a benchmark or the suite wrote") from None
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: expected an object, got a {type(stored).__name__}; name what a benchmark wrote")
    return stored


# -- from results to a table


def render_table(results: list[Result]) -> str:
    """Write results as a block of the head that they share and a table of their rows.

    Fields of the heads that differ become columns.
    """
    heads = [head | {"date": head["date"][:10]} for head in (result.head for result in results)]
    shared = {field: heads[0].get(field, "") for field in FIELDS if len({head.get(field) for head in heads}) == 1}
    words = [head["command"].split() for head in heads]
    prefix = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*words))]
    fields = [{field: head.get(field, "") for field in FIELDS if field not in shared} for head in heads]
    if "command" not in shared:
        while prefix and prefix[-1].startswith("-"):  # an option stays with its value
            prefix.pop()
        shared["command"] = " ".join([*prefix, "…"])
        for row, command in zip(fields, words, strict=True):
            options = " ".join(command[len(prefix) :])
            row["command"] = f"`{options}`" if options else ""
    notes = [{"note": extra.pop("note")} if "note" in extra else {} for extra in fields]
    columns = zip(fields, notes, results, strict=True)
    rows = [left | row | right for left, right, result in columns for row in result.rows]
    return f"```text\n{_render_head(shared)}\n```\n\n{_render_rows(rows)}"


def _render_head(shared: dict[str, str]) -> str:
    lines = {
        "command": [shared["command"]],
        "commit" if "commit" in shared else "date": [shared.get("commit"), shared.get("date")],
        "device": [shared.get("platform"), shared.get("device")],
        "note": [shared.get("note")],
    }
    texts = {name: ", ".join(filter(None, values)) for name, values in lines.items()}
    options = dict(width=WIDTH, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
    return "\n".join(textwrap.fill(f"{name:<9}{text}", **options) for name, text in texts.items() if text)


def _render_rows(rows: list[dict[str, Any]]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row))
    columns = [format_column([row.get(title) for row in rows]) for title in titles]
    marks = ["---:" if _is_numeric([row.get(title) for row in rows]) else "---" for title in titles]
    lines = [titles, marks, *map(list, zip(*columns, strict=True))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _is_numeric(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values if value is not None)


def format_column(values: list[Any]) -> list[str]:
    """Write the values of a column: numbers to as many places as the largest needs for three digits."""
    largest = max((abs(value) for value in values if isinstance(value, float)), default=0.0)
    places = 0 if largest >= 100 else 1 if largest >= 10 else 2 if largest > 1 else 3
    return [_format_value(value, places) for value in values]


def _format_value(value: Any, places: int) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return "; ".join(f"{name} {_format_value(figure, places)}" for name, figure in value.items())
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return re.sub(r"e-0?", "e-", f"{value:.1e}")
    return f"{value:,.{places}f}"


# -- of the families


def render_families(results: list[Result]) -> str:
    """Write how far it was shown that each family trains and rolls out, on each platform that is a machine.

    On the platform that the results were measured on, what they have no row of is untested, whatever may be there. So
    are videos on every other.
    """
    from engines.models.families import find_family, list_families
    from hardware.attention.rollouts import list_parts
    from hardware.platforms import PLATFORMS, get_platform
    from rlworker.checks.support import find_levels, list_inputs, list_rules

    shown = {(result.head["platform"].split()[0], r["family"], r["part"]) for result in results for r in result.rows}
    machines = [platform for platform in map(get_platform, PLATFORMS) if platform.evidence == "executed"]
    rows = []
    for name in list_families():
        family = find_family(name, DOCS)
        for sees in list_inputs(family):
            row = {"family": name, "sees": sees, "rules": ", ".join(list_parts(list_rules(family)))}
            for platform in machines:
                measured = {part for place, of, part in shown if (place, of) == (platform.name, name)}
                asked = measured if any(place == platform.name for place, *_ in shown) else None
                levels = find_levels(family, platform, sees, asked)
                row |= {f"{platform.name}: {part}": level for part, level in levels.items()}
            rows.append(row)
    return _render_rows(rows)


# -- into the pages


def fill_page(page: Path, results: dict[str, Result]) -> tuple[str, set[str]]:
    """Return a page's text with its tables as the results give them, and the names of those that it uses.

    Raises:
        ValueError: a table has no end, or names what there is no result of.
    """
    text, used_names = page.read_text(), set()

    def replace_table(match: re.Match) -> str:
        names, render = [], render_families if match[2].startswith(FAMILIES) else render_table
        for pattern in match[2].removeprefix(FAMILIES).split():
            matching_names = fnmatch.filter(results, pattern)
            if not matching_names:
                raise ValueError(f"{page}: table {pattern!r} has no docs/results/{pattern}.json; add it by tables.py")
            names += matching_names
        used_names.update(names)
        return f"{match[1]}{render([results[name] for name in names])}{match[4]}"

    begin_count = text.count(BEGIN)
    filled, count = TABLE.subn(replace_table, text)
    if not begin_count == count == text.count(END):
        raise ValueError(f"{page}: {begin_count} tables begin and {text.count(END)} end; close each by {END}")
    return filled, used_names


def fill_pages(docs: Path) -> dict[Path, str]:
    """Return the text of every page with its tables as ``docs/results/`` gives them.

    Raises:
        ValueError: a result or a page is broken, or no page shows a result.
    """
    results = {path.stem: check_result(path, _read_object(path)) for path in sorted((docs / "results").glob("*.json"))}
    filled = {page: fill_page(page, results) for page in sorted(docs.glob("*.md"))}
    if unused := sorted(set(results).difference(*(names for _, names in filled.values()))):
        raise ValueError(f"{docs / 'results'}: no page shows {', '.join(unused)}; give it a table, or remove the file")
    return {page: text for page, (text, _) in filled.items()}


def find_faults(docs: Path) -> list[str]:
    """Say of every page where it does not hold what the results give."""
    try:
        filled = fill_pages(docs)
    except ValueError as error:
        return [str(error)]
    faults = []
    for page, text in filled.items():
        changes = list(difflib.unified_diff(page.read_text().splitlines(), text.splitlines(), n=0, lineterm=""))[3:]
        if changes:
            faults.append("\n".join([f"{page}: not what docs/results gives; run scripts/tables.py", *changes[:10]]))
    return faults


# -- from sources to results


def read_run(folder: Path, at: list[int]) -> list[dict[str, Any]]:
    """Sum a run folder up in one row.

    Args:
        at: steps after which the held-out score is shown, beside the first and the last.

    Raises:
        ValueError: the run took no step, or nothing was evaluated after such a step.
    """
    from rlworker.tracking.log import read_metrics

    lines, row = read_metrics(folder), {}
    steps = [line["time_step"] for line in lines if "time_step" in line]
    if not steps:
        raise ValueError(f"{folder}: the run took no step; name one that did")
    for title, metric in (("held-out reward", "heldout"), ("held-out loss", "heldout_loss")):
        scores = {line["step"]: line[metric] for line in lines if metric in line}
        if not scores:
            continue
        if missing := sorted(set(at) - set(scores)):
            raise ValueError(f"{folder}: no {title} after step {missing[0]}; --at takes any of {list(scores)}")
        row |= {f"{title} before": next(iter(scores.values()))} | {f"after {step}": scores[step] for step in at}
        row["at the end"] = next(reversed(scores.values()))
    row["steps"] = lines[-1]["step"]
    for title, metric in (("mean", "logprob_diff_mean"), ("largest", "logprob_diff_max")):
        if values := [line[metric] for line in lines if metric in line]:
            row[f"logprob difference: {title}"] = max(values)
    row["seconds a step"] = statistics.median(steps)
    clock = [line["time_wall"] for line in lines]
    row["seconds"] = sum(a for a, b in zip(clock, [*clock[1:], 0.0]) if b < a)  # each program counts from its start
    return [row]


def read_starts(folder: Path) -> dict[str, Any]:
    """Read what heads a run: of several programs, one after another, every value that they had."""
    path = folder / "starts.jsonl"
    starts = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    shared = {field: ", ".join(dict.fromkeys(start[field] for start in starts)) for field in NEEDED if starts}
    return shared | ({"versions": starts[-1]["versions"]} if starts else {})


def sum_costs(files: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Add up what files of tests cost: a row for each folder of tests/, and one for all."""
    rows = {}
    for file, costs in files.items():
        folder = file if "/" not in file else "/".join(Path(file).parts[: 2 if len(Path(file).parts) > 2 else 1])
        for name in (folder, "all"):
            row = rows.setdefault(name, {"tests": name, "CPU-seconds": 0.0} | dict.fromkeys(KINDS.values(), 0))
            row["CPU-seconds"] += costs["cpu_s"]
            for kind, title in KINDS.items():
                row[title] += costs[kind]
    total = rows.pop("all")
    return [*rows.values(), total]


def add_result(source: Path, target: Path, at: list[int], fields: dict[str, str], families: bool = False) -> None:
    """Store a run folder, or what a benchmark or the suite wrote, as the result ``target``.

    Args:
        fields: of the head, which the source lacks, or which stand in place of its own.
        families: of what tests measured, rows by family in place of rows by test.

    Raises:
        ValueError: it is none of these, or the head is not complete.
    """
    if source.is_dir():
        if not (source / "metrics.jsonl").is_file():
            raise ValueError(f"{source}: not a run folder: it has no metrics.jsonl; name the folder of a run")
        stored = {"head": read_starts(source), "rows": read_run(source, at)}
    else:
        stored = _read_object(source)
        if "files" in stored:
            stored = {"head": stored.get("head", {}), "rows": sum_costs(stored["files"])}
        by_family = stored.pop("families", [])
        stored |= {"rows": by_family} if families else {}
    stored["head"] = stored.get("head", {}) | fields
    check_result(source, stored)
    target.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)
    adding = parser.add_subparsers(dest="action").add_parser("add", help="store a result")
    adding.add_argument("source", type=Path)
    adding.add_argument("--name", required=True)
    adding.add_argument("--at", type=int, nargs="+", default=[], metavar="STEP", help="held-out scores of a run")
    adding.add_argument("--families", action="store_true", help="of --measured, rows by family")
    for field in FIELDS:
        adding.add_argument(f"--{field}", help="in place of what the source says")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.action == "add":
            fields = {field: value for field in FIELDS if (value := getattr(options, field))}
            target = options.docs / "results" / f"{options.name}.json"
            add_result(options.source, target, options.at, fields, options.families)
        elif options.check:
            faults = find_faults(options.docs)
            print("\n".join(faults or ["every table is what docs/results gives"]))
            return 1 if faults else 0
        else:
            for page, text in fill_pages(options.docs).items():
                page.write_text(text)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
