"""Write rows of docs/evidence.md from what runs recorded themselves: command, numbers, commit and device.

    .venv/bin/python scripts/pages/evidence.py "GRPO learns additions" runs/demo_cpu

Several runs of one claim make one row. A row of the same claim is replaced; a new claim is put at the end of the table.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"
HEAD = "| claim | command | number | commit | device |\n|---|---|---|---|---|\n"
"""The head of the table that rows are written into."""


def read_lines(path: Path) -> list[dict]:
    """Read the whole lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def describe_numbers(lines: list[dict]) -> str:
    """Describe a run's held-out scores by step, its largest mean difference, and its seconds.

    Args:
        lines: those of metrics.jsonl.

    Raises:
        ValueError: the run has no held-out score.
    """
    scores = [(line["step"], line["heldout"]) for line in lines if "heldout" in line]
    if not scores:
        raise ValueError("evidence: metrics.jsonl has no 'heldout'; give the run held-out rows with --data.heldout")
    (_, before), *later = scores
    text = f"{before:.3f} before"
    if later:
        values, steps = ", ".join(f"{score:.3f}" for _, score in later), ", ".join(str(step) for step, _ in later)
        text += f"; {values} after {steps} steps"
    if differences := [line["logprob_diff_mean"] for line in lines if "logprob_diff_mean" in line]:
        text += f"; `DIFF` mean {max(differences):.1e}".replace("e-0", "e-")
    seconds = sum(line.get(part, 0.0) for line in lines for part in ("time_step", "time_evaluate", "time_save"))
    return f"{text}; {seconds:.0f} s"


def make_row(claim: str, runs: list[Path]) -> str:
    """Make the row of a claim from run folders.

    Raises:
        ValueError: a folder is no run, a run did not record its commit, or has no held-out score.
    """
    cells: list[tuple[str, str, str, str]] = []
    for run in runs:
        if not (run / "metrics.jsonl").is_file() or not (run / "starts.jsonl").is_file():
            raise ValueError(f"evidence: {str(run)!r} is no run folder, with metrics.jsonl and starts.jsonl")
        starts = read_lines(run / "starts.jsonl")
        commits = ", ".join(dict.fromkeys(start["commit"] for start in starts))
        command = starts[0]["command"].removeprefix("python ")
        cells.append(
            (f"`{command}`", describe_numbers(read_lines(run / "metrics.jsonl")), commits, starts[0]["device"])
        )
    columns = [". ".join(dict.fromkeys(column)) for column in zip(*cells, strict=True)]
    return f"| {' | '.join([claim, *columns])} |"


def put_row(page: str, claim: str, row: str) -> str:
    """Put a row into the page's table: in the place of the claim's, else at the end.

    Raises:
        ValueError: the page has no such table.
    """
    if HEAD not in page:
        raise ValueError(f"evidence: the page has no table with the head {HEAD.splitlines()[0]!r}")
    before, _, after = page.partition(HEAD)
    table = re.match(r"(?:\|.*\n)*", after)
    rows = table[0].splitlines() if table else []
    kept = [row if old.startswith(f"| {claim} |") else old for old in rows]
    if row not in kept:
        kept.append(row)
    return before + HEAD + "".join(f"{line}\n" for line in kept) + after[len(table[0]) if table else 0 :]


def main() -> None:
    """Write the row that the command line asks for."""
    if len(sys.argv) < 3:
        sys.exit(f"error: name a claim and its runs\n\n{__doc__}")
    claim, *folders = sys.argv[1:]
    try:
        row = make_row(claim, [Path(folder) for folder in folders])
        PAGE.write_text(put_row(PAGE.read_text("utf-8"), claim, row), "utf-8")
    except ValueError as error:
        sys.exit(str(error))
    print(row)


if __name__ == "__main__":
    main()
