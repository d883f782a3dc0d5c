"""The page that compares runs."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.program import run_program

from rlworker.__main__ import main
from rlworker.config.run import RunConfig
from rlworker.config.sections import CurriculumConfig, RecoveryConfig
from rlworker.tracking.report.compare import write_comparison
from rlworker.tracking.report.page import LIBRARY


def make_run(folder: Path, config: RunConfig, steps: int, scale: float, prompts: str = "ab", **stored) -> Path:
    """A run folder whose steps take ``scale`` seconds and sample ``10 * scale`` tokens."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(config) | stored))
    lines = [{"step": 0, "heldout": 0.0, "time_evaluate": 0.5, "time_start_trainers": 9.0}]
    lines += [
        {
            "step": step,
            "reward": step * scale,
            "tokens_per_second": 10.0,
            "time_step": scale,
            "completion_tokens_p90": 7,
        }
        for step in range(1, steps + 1)
    ]
    lines[-1]["heldout"] = scale / 10
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"completion": f"<b>{folder.name}</b>", "answer": "2", "reward": 1.0, "version": 0}
    for step in range(1, steps + 1):
        rows = [json.dumps(sample | {"prompt": f"{prompt} of {step}"}) for prompt in prompts]
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def read_tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of each table by the heading before it."""
    parts = re.split(r"<h\d>(.*?)</h\d>", page.partition("<body>")[2])[1:]
    cells = lambda part: [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S) for row in part.split("<tr")[1:]]  # noqa: E731
    return {heading: cells(part) for heading, part in zip(parts[::2], parts[1::2])}


@pytest.fixture
def runs(tmp_path):
    first = RunConfig(steps=3, model="m", run_dir="one")
    second = replace(first, steps=5, run_dir="two", curriculum=CurriculumConfig(pass_rates=(0.1, 1.0)))
    one = make_run(tmp_path / "one", first, 3, 2.0)
    two = make_run(tmp_path / "two", second, 5, 1.0, "bc", own="x", unknown_before=True)
    return one, two


def test_settings_that_differ_curves_and_samples_stand_side_by_side(runs):
    page = write_comparison(runs).read_text()
    tables = read_tables(page)
    assert tables["Settings that differ"][1:] == [
        ["steps", "3", "5"],
        ["curriculum.pass_rates", "[0.0, 1.0]", "[0.1, 1.0]"],
        ["own", "-", "x"],
        ["unknown_before", "-", "true"],
    ]
    results = {row[0]: row[1:] for row in tables["Results"]}
    assert results["steps"] == ["3", "5"] and results["tokens"] == ["60", "50"] and results["seconds"] == ["6", "6"]
    assert results["heldout"] == ["0 to 0.2, best 0.2 at step 3", "0 to 0.1, best 0.1 at step 5"]
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.S)
    data = json.loads(text)
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    plots = [(plot["title"], plot["lines"]) for plot in data["plots"]]
    assert plots[:2] == [
        ("Reward: sampled, training prompts", {"reward": "sampled, training prompts"}),
        ("Reward: greedy, held-out prompts", {"heldout": "greedy, held-out prompts"}),
    ], "one metric a plot"
    axes = [run["axes"] for run in data["runs"]]
    assert axes[0] == {"step": [0, 1, 2, 3], "tokens": [0, 20, 40, 60], "seconds": [0.5, 2.5, 4.5, 6.5]}
    assert axes[1]["tokens"] == [0, 10, 20, 30, 40, 50] and axes[1]["seconds"][-1] == 5.5
    assert data["runs"][1]["numbers"]["heldout"] == [[0, 5], [0.0, 0.1]]
    assert (runs[0] / LIBRARY).is_file() and not (runs[1] / LIBRARY).exists()
    # The steps that both have, and the prompt that both have.
    shown = [heading for heading in tables if heading.startswith("Step ")]
    assert shown == ["Step 1", "Step 2", "Step 3"]
    names, prompt, samples = tables["Step 2"]
    assert names == ["one", "two"] and prompt[0].startswith("b of 2") and "a of 2" not in page
    assert ["&lt;b&gt;one&lt;/b&gt;" in samples[0], "&lt;b&gt;two&lt;/b&gt;" in samples[1]] == [True, True]


def test_settings_that_differ_in_a_late_digit_are_shown_in_full(tmp_path):
    runs = [
        make_run(tmp_path / str(limit), RunConfig(recovery=RecoveryConfig(stall_timeout_s=limit)), 1, 1.0)
        for limit in (1000000.0, 1000001.0)
    ]
    table = read_tables(write_comparison(runs).read_text())["Settings that differ"]
    assert table[1:] == [["recovery.stall_timeout_s", "1000000", "1000001"]]


def test_runs_without_a_common_prompt_show_samples_of_one_place(runs, tmp_path):
    three = make_run(tmp_path / "other" / "one", RunConfig(steps=2), 2, 1.0, "xyz")
    page = write_comparison([runs[0], three], tmp_path / "page.html").read_text()
    assert (tmp_path / LIBRARY).is_file()
    tables = read_tables(page)
    assert tables["Results"][0][1:] == [str(runs[0]), str(three)], "names that are alike name nothing"
    _, first, second = tables["Step 2"]
    assert "a of 2" in first[0] and "x of 2" in first[1] and "b of 2" in second[0] and "y of 2" in second[1]


def test_many_long_runs_take_less_data_each(tmp_path):
    folders = [make_run(tmp_path / str(number), RunConfig(), 2, 1.0) for number in range(11)]
    lines = "".join(json.dumps({"step": step, "time_step": 1.0, "reward": step}) + "\n" for step in range(3000))
    for folder in folders:
        (folder / "metrics.jsonl").write_text(lines)
    text = write_comparison(folders).read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    assert all(180 <= len(run["axes"]["step"]) <= 200 for run in data["runs"])


def test_it_is_a_command(runs, tmp_path):
    done = run_program(main, "compare", *runs, "--output", tmp_path / "new" / "both.html")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "new" / "both.html")), done.stderr
    alone = run_program(main, "compare", runs[0])
    assert alone.returncode == 1 and "error: compare: 1 run is named, expected two or more" in alone.stderr
    missing = run_program(main, "compare", runs[0], tmp_path)
    assert missing.returncode == 1 and "is not a run folder" in missing.stderr
