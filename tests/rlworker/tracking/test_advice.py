"""What a report says first: the run in five lines, what failed, and advice by rules that a page lists."""

import json
import math
import re
from pathlib import Path

import pytest

from rlworker.tracking.report.advice import RULES, advise
from rlworker.tracking.report.opening import describe_run, list_failures, spell_seconds
from rlworker.tracking.report.page import render_report
from rlworker.tracking.report.record import RunRecord

ROOT = Path(__file__).parents[3]
STEPS = 40
HEALTHY = {
    "logprob_diff_mean": 5e-7,
    "logprob_diff_max": 1e-5,
    "logprob_diff_limit": 2e-5,
    "truncated": 0.29,
    "zero_variance_share": 0.79,
    "entropy": 0.5,
    "reward": 0.5,
    "samples": 100,
    "episode_failures": 10,
    "time_step": 2.0,
}


def make_record(folder: Path, change=lambda step: {}, stored=None, scores=()) -> RunRecord:
    """A run of healthy steps, with the numbers that ``change`` gives a step, and held-out scores by step."""
    lines = [{"step": 0}, *({"step": step} | HEALTHY | change(step) for step in range(1, STEPS + 1))]
    for step, score in scores:
        lines[step] |= score
    stored = {"model": "m", "platform": "cpu", "rollout": {}} | (stored or {})
    return RunRecord(folder, stored, [], lines)


BAD = {
    "The difference of rollout and trainer rises": lambda step: {"logprob_diff_mean": 5e-7 * 1.1**step},
    "Answers are cut off": lambda step: {"truncated": 0.31},
    "Most groups teach nothing": lambda step: {"zero_variance_share": 0.81},
    "Entropy collapses": lambda step: {"entropy": 0.5 * 0.9**step},
    "Episodes fail": lambda step: {"episode_failures": 11},
}


def test_a_healthy_run_needs_no_advice(tmp_path):
    """Every number stands just within its rule."""
    scores = [(0, {"heldout": 0.1}), (20, {"heldout": 0.5}), (30, {"heldout": 0.46}), (40, {"heldout": 0.46})]
    assert advise(make_record(tmp_path, scores=scores)) == []
    assert advise(RunRecord(tmp_path, {"rollout": {}}, [], [])) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_curve_gets_its_advice(tmp_path, name):
    (advice,) = advise(make_record(tmp_path, BAD[name]))
    assert advice.name == name and re.search(r"\d", advice.seen)
    assert "--" in advice.do or "environment.log" in advice.do


def test_a_policy_that_has_learned_may_be_sure(tmp_path):
    change = lambda step: {"entropy": 0.5 * 0.9**step, "reward": 0.91}  # noqa: E731
    assert advise(make_record(tmp_path, change)) == []
    (advice,) = advise(make_record(tmp_path, change, {"environment": {"pass_reward": 2.0}}))
    assert advice.name == "Entropy collapses"


def test_a_difference_far_below_its_limit_may_grow(tmp_path):
    change = lambda step: {"logprob_diff_mean": 1e-9 * 1.1**step}  # noqa: E731
    assert advise(make_record(tmp_path, change)) == []


@pytest.mark.parametrize("numbers", [[0.5, 0.44, 0.44], [0.5, 0.44, 0.6], [0.5, 0.46, 0.44], [0.44, 0.44, 0.5]])
def test_a_held_out_score_falls_if_two_validations_lack_a_tenth(tmp_path, numbers):
    scores = [(step, {"heldout": number}) for step, number in zip((10, 20, 30), numbers, strict=True)]
    found = advise(make_record(tmp_path, scores=scores))
    assert [advice.name for advice in found] == ["A held-out score falls"] * (numbers == [0.5, 0.44, 0.44])


def test_a_held_out_loss_falls_if_it_rises(tmp_path):
    scores = [(step, {"heldout_loss": loss}) for step, loss in ((10, 1.0), (20, 1.2), (30, math.nan), (40, 1.3))]
    (advice,) = advise(make_record(tmp_path, scores=scores))
    assert advice.seen == "heldout_loss was 1 after step 10, and is 1.3"


def test_the_page_lists_every_rule():
    page = (ROOT / "docs" / "metrics.md").read_text().partition("### Advice")[2].partition("\n## ")[0]
    rows = [tuple(row.split(" | ")) for row in re.findall(r"^\| (.+) \|$", page, re.M)[1:]]
    assert rows == [(rule.name, rule.when, rule.advice) for rule in RULES]


def test_every_option_that_advice_names_is_a_setting():
    page = (ROOT / "docs" / "configuration.md").read_text()
    options = {option for rule in RULES for option in re.findall(r"--[\w.-]*\w", f"{rule.advice} {rule.when}")}
    assert len(options) >= 8 and {option for option in options if f"| `{option}` |" not in page} == set()


def test_a_run_is_told_in_five_lines(tmp_path):
    stored = {"steps": 80, "prompts_per_step": 4, "samples_per_prompt": 2, "data": {"train": "a/rows.jsonl"}}
    scores = [(0, {"heldout": 0.25}), (20, {"heldout": 0.75}), (40, {"heldout": 0.5, "time_evaluate": 5.0})]
    run = make_record(tmp_path, stored=stored, scores=scores)
    run.starts.append({"command": "python -m recipes.grpo --steps 80", "models": {"actor": "m, qwen2, 2 layers"}})
    assert describe_run(run) == [
        ("model", "m, qwen2, 2 layers"),
        ("task", "recipes.grpo on rows.jsonl"),
        ("steps", "40 of 80, of 4 prompts with 2 samples each"),
        ("heldout", "0.25 → 0.5, best 0.75 after step 20"),
        ("time", "1 min 25 s, 2 s a step"),
    ]
    assert dict(describe_run(make_record(tmp_path)))["reward"] == "0.5 → 0.5, best 0.5 in step 1"
    assert [name for name, _ in describe_run(RunRecord(tmp_path, {}, [], []))][3] == "held-out"
    assert [spell_seconds(seconds) for seconds in (59.6, 3600, 59)] == ["1 min 0 s", "1 h 0 min", "59 s"]


def test_what_failed_is_told_by_kind(tmp_path):
    change = lambda step: {"episode_failures": 1, "episode_timeout": step % 2, "episode_wrong_count": 1 - step % 2}  # noqa: E731
    scores = [(0, {"skipped_train": 3, "heldout_failures": 2, "heldout_raised": 2, "heldout_pass_at_2": 0.5})]
    run = make_record(tmp_path, change, {"rollout": {"attention_override": ["window"]}}, scores)
    (tmp_path / "rejected").mkdir()
    told = list_failures(run, outages=1)
    assert told[:4] == [
        "40 episodes of training failed: 20 timeout, 20 wrong count",
        "2 held-out episodes failed: 2 raised",
        "3 training rows were skipped, since they are too long or have bad images",
        "1 outage: lost workers were replaced",
    ]
    assert "window did not honour" in told[4] and "rejected/" in told[5] and len(told) == 6
    (tmp_path / "rejected").rmdir()
    assert list_failures(make_record(tmp_path, lambda step: {"episode_failures": 0}), 0) == []


def test_the_report_opens_with_the_run_and_ends_with_settings(tmp_path):
    """Curve, lines, failures, advice, curves; settings and versions come last and are folded."""
    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu", "model": "m"}))
    lines = [{"step": step} | HEALTHY | {"truncated": 0.5} for step in range(1, 12)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render_report(tmp_path)
    body = page.partition("<main>")[2].partition("</main>")[0]
    marks = ['data-plot="0"', "<th>model</th>", "What failed", "<b>Answers are cut off</b>", 'name="axis"', "<figure"]
    marks += ["Time, settings and versions", "All settings", "commit and versions"]
    places = [body.index(mark, body.index(marks[0])) for mark in marks]
    assert places == sorted(places)
    assert body.count('data-plot="0"') == 1, "the first curve is not drawn twice"
    shown, folded = body.partition("Time, settings and versions")[::2]
    assert "<details" not in shown and folded.count("<details>") == 4 and "<details open" not in folded
    number = int(re.findall(r'href="#plot-(\d+)"', shown)[0])
    assert re.search(
        rf'id="plot-{number}"><h3>Shares of a step that teach little</h3>.*?\. <b class="bad">Answers are cut off',
        shown,
    )


def test_each_difference_has_its_own_limit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu", "model": "m"}))
    line = HEALTHY | {"step": 1, "logprob_diff_max_limit": 5e-3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = render_report(tmp_path)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.S)[0])
    (plot,) = [plot for plot in data["plots"] if "logprob_diff_max" in plot["lines"]]
    assert plot["limits"] == {"logprob_diff_limit": "logprob_diff_mean", "logprob_diff_max_limit": "logprob_diff_max"}
    assert plot["limits"].keys() < plot["lines"].keys() and plot["scale"] == "log"
    assert data["runs"][0]["numbers"]["logprob_diff_max_limit"] == [None, [5e-3]]
    assert 'dash: "dash"' in page
