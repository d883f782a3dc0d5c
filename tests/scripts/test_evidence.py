"""Rows of docs/evidence.md say what a run recorded, and nothing else."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "pages"))
import evidence

sys.path.pop(0)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    start = {"command": "python -m recipes.demos.cpu --steps 2", "commit": "abc1234", "device": "a CPU, 2 cores"}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(start | {"commit": "def5678"}) + "\n")
    lines = [
        {"step": 0, "heldout": 0.25, "time_evaluate": 1.5},
        {"step": 1, "logprob_diff_mean": 5e-7, "time_step": 2.0},
        {"step": 2, "heldout": 0.75, "logprob_diff_mean": 7.54e-7, "time_step": 2.0, "time_save": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "hel')
    return tmp_path


def test_a_row_has_the_runs_own_command_numbers_commits_and_device(run):
    row = evidence.make_row("it learns", [run])
    numbers = "0.250 before; 0.750 after 2 steps; `DIFF` mean 7.5e-7; 6 s"
    assert row == f"| it learns | `-m recipes.demos.cpu --steps 2` | {numbers} | abc1234, def5678 | a CPU, 2 cores |"


def test_a_row_takes_the_place_of_its_claim_or_the_end(run):
    row = evidence.make_row("it learns", [run])
    page = f"# Page\n\n{evidence.HEAD}| it learns | old | 0 | a | b |\n| other | x | 1 | a | b |\n\nText.\n"
    replaced = evidence.put_row(page, "it learns", row)
    assert replaced == page.replace("| it learns | old | 0 | a | b |", row)
    assert evidence.put_row(replaced, "it learns", row) == replaced
    added = evidence.put_row(page, "new", "| new | y | 2 | a | b |")
    assert added == page.replace("| other | x | 1 | a | b |\n", "| other | x | 1 | a | b |\n| new | y | 2 | a | b |\n")


def test_what_is_no_run_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="is no run folder"):
        evidence.make_row("it learns", [tmp_path / "no"])
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="has no 'heldout'"):
        evidence.make_row("it learns", [run])
    with pytest.raises(ValueError, match="has no table"):
        evidence.put_row("# Page\n", "it learns", "| |")


def test_the_page_has_the_table():
    assert evidence.HEAD in (ROOT / "docs" / "evidence.md").read_text()
