"""report.html, and a run that cannot draw one."""

import json
import math
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from rlworker.config.run import RunConfig
from rlworker.tracking.log import RL_LINE, RunLog
from rlworker.tracking.report.curves import MOST_LINES
from rlworker.tracking.report.page import LIBRARY, format_report, write_report
from rlworker.tracking.trackers import TrackedRun, Trackers


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu"}))
    steps = [{"step": step, "time_step": 2.0, "reward": 0.0625 * step} for step in (1, 2)]
    write_lines(tmp_path, steps)
    return tmp_path


def write_lines(folder: Path, lines: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_data(page: str) -> dict:
    """The data of a page's plots."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def read_points(data: dict, metric: str, axis: str = "step", run: int = 0) -> list[tuple[float, float]]:
    """The points of a metric, as the page draws them."""
    run_data = data["runs"][run]
    places, numbers = run_data["numbers"][metric]
    axis_values = run_data["axes"][axis]
    return list(zip(axis_values if places is None else [axis_values[place] for place in places], numbers, strict=True))


def test_a_run_without_plotly_has_a_note_in_place_of_a_report(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "plotly", None)  # as if it were not installed
        assert f"pip install plotly, then: rlworker report {folder}" in format_report(folder)
        with pytest.raises(ValueError, match="plotly, which draws it, is not installed"):
            write_report(folder)
        assert not (folder / "report.html").exists()
    assert format_report(folder) == f"report: {folder / 'report.html'}"
    page = (folder / "report.html").read_text()
    data = read_data(page)
    (plot,) = data["plots"]
    assert plot["title"] == "Reward: sampled, training prompts" and plot["lines"] == {
        "reward": "sampled, training prompts"
    }
    assert read_points(data, "reward") == [(1, 0.0625), (2, 0.125)]
    assert (
        f'<figure id="plot-0"><h3>{plot["title"]}</h3><div class="plot" data-plot="0"></div><figcaption>{plot["good"]}<'
        in page
    )


def test_the_library_lies_beside_the_page_once(folder):
    """A page without it says what it needs; it is not written again."""
    page = write_report(folder).read_text()
    library = folder / LIBRARY
    assert library.stat().st_size > 10**6 and f'<script src="{LIBRARY}"></script>' in page
    assert f"The curves need {LIBRARY}" in page and len(page) < 20_000
    library.write_text("kept")
    write_report(folder)
    assert library.read_text() == "kept"


def make_line(step: int, generator: random.Random) -> dict:
    """A line of a step with as many metrics as a run of PPO with a curriculum has, none of which is short."""
    names = "reward reward_std zero_variance_share truncated completion_tokens completion_tokens_p10 loss entropy "
    names += "completion_tokens_p50 completion_tokens_p90 clip_fraction ratio_max kl policy_kl correction rejected "
    names += "grad_norm logprob_diff_mean logprob_diff_max tokens_per_second flops_per_second memory_gb value_loss "
    names += "rollout_memory_gb explained_variance critic_grad_norm time_rollout time_logprobs time_values time_sync "
    names += "time_update time_canary curriculum/too_easy curriculum/too_hard curriculum/seen own_metric"
    line = {name: generator.lognormvariate(0, 3) for name in names.split()}
    return {"step": step, "time_step": sum(v for k, v in line.items() if k.startswith("time_"))} | line


def write_samples(folder: Path, steps: range, text: str) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    sample = {"prompt": text, "completion": text, "answer": "2", "reward": 1.0, "version": 3, "outcome": "ok"}
    turns = [{"by": "prompt", "text": text}, {"by": "model", "text": text, "learns": True, "reward": 1.0}]
    for step in steps:
        lines = [json.dumps(sample | {"turns": turns * 4})] * 8
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_data_of_a_thousand_steps_take_less_than_a_megabyte(folder):
    """With samples that are too long to show, of which some are left out; the page says so."""
    generator = random.Random(0)
    lines = [{"step": 0, "heldout": 0.1}, *(make_line(step, generator) for step in range(1, 1001))]
    write_lines(folder, lines)
    write_samples(folder, range(10, 1001, 10), "<&é" * 3000)
    page = write_report(folder)
    assert page.stat().st_size <= 10**6
    html = page.read_text()
    data = read_data(html)
    assert len(read_points(data, "kl")) == 1000 and read_points(data, "heldout") == [(0, 0.1)]
    assert all(math.isclose(y, lines[x]["kl"], rel_tol=1e-4) for x, y in read_points(data, "kl"))
    shown = [html.count(f"<h3>Step {step}</h3>") for step in (10, 20, 970, 980, 990, 1000)]
    assert shown == [1] * 6 and "5000 characters are left out" in html and "more in rollouts/" in html


def test_a_longer_run_is_drawn_by_stretches_which_keep_every_spike(folder):
    """Each stretch keeps its lowest and highest number in order; of seconds, which are stacked, the mean."""
    generator = random.Random(1)
    lines = [make_line(step, generator) for step in range(1, 12_346)]
    write_lines(folder, lines)
    data = read_data(write_report(folder).read_text())
    points, width = read_points(data, "grad_norm"), data["runs"][0]["width"]
    assert MOST_LINES * 0.9 < len(points) <= MOST_LINES and width == 24
    for start in range(0, len(lines), width):
        stretch = lines[start : start + width]
        values = [float(f"{line['grad_norm']:.5g}") for line in stretch]
        ends = points[2 * start // width : 2 * start // width + 2]
        assert [x for x, _ in ends] == [stretch[0]["step"], stretch[-1]["step"]]
        low_first = values.index(min(values)) < values.index(max(values))
        assert [y for _, y in ends] == sorted((min(values), max(values)), reverse=not low_first)
    first = [y for _, y in read_points(data, "time_update")[:2]]
    assert first == [pytest.approx(sum(line["time_update"] for line in lines[:width]) / width, rel=1e-4)] * 2


def test_the_foot_has_models_command_commit_and_settings(folder):
    config = RunConfig(steps=7, prompts_per_step=48)
    (folder / "config.json").write_text(json.dumps(asdict(config) | {"own": "<x>"}))
    starts = [
        {"step": 0, "command": "python -m recipes.grpo --steps 5", "commit": "abc1234+", "date": "2026-01-31"}
        | {"platform": "cpu (executed)", "device": "a CPU", "versions": {"torch": "2.12"}}
        | {"models": {"actor": "folder, qwen2, 24 layers, 494,032,768 weights"}},
        {"step": 5, "commit": "def5678", "date": "2026-02-01", "changed": {"steps": [5, 7]}},
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    page = write_report(folder).read_text()
    foot = page[page.index("Time, settings and versions") :]
    for key, value in (*starts[0]["models"].items(), ("commit", "abc1234+"), ("versions", "torch 2.12")):
        assert f"<th>{key}</th><td>{value}</td>" in foot
    assert "<th>command</th><td>python -m recipes.grpo --steps 5</td>" in foot
    own = foot.partition("Settings that differ")[2].partition("</table>")[0]
    assert re.findall("<th>(.*?)</th><td>(.*?)</td>", own) == [
        ("steps", "7"),
        ("prompts_per_step", "48"),
        ("own", "&lt;x&gt;"),
    ]
    assert "<td>5</td><td>2026-02-01</td><td>def5678</td><td>steps 5 to 7</td>" in foot


def test_phases_that_took_nothing_and_lines_at_rest_are_left_out(folder):
    """Greedy samples and values were not asked for; logprobs took a microsecond; turns and clipping say nothing."""
    phases = {"time_rollout": 1.0, "time_logprobs": 1e-6, "time_update": 0.5, "time_environment": 0.25}
    rest = {"turns": 1, "forks": 0, "clip_fraction": 0.0, "ratio_max": 1.0, "episode_failures": 0}
    write_lines(folder, [{"step": step, "time_step": 2.0} | phases | rest for step in (1, 2, 3)])
    page = write_report(folder).read_text()
    data = read_data(page)
    assert [plot["lines"] for plot in data["plots"]] == [{"time_rollout": "rollout", "time_update": "update"}]
    assert data["plots"][0]["stack"]
    times = page.partition("Where the time goes")[2]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", times)
    assert [(name, share) for name, _, share in rows] == [
        ("rollout", "50.0 %"),
        ("environments alone, within rollout", "12.5 %"),
        ("update", "25.0 %"),
        ("other", "25.0 %"),
    ]
    told = "turns 1, forks 0, clip_fraction 0, ratio_max 1, episode_failures 0."
    assert f"Not drawn, since it stayed as it was: {told}" in page
    moved = [{"step": 4, "time_step": 2.0} | phases | rest | {"clip_fraction": 0.1}]
    write_lines(folder, [{"step": 3, "time_step": 2.0} | phases | rest, *moved])
    titles = [plot["title"] for plot in read_data(write_report(folder).read_text())["plots"]]
    assert titles[0] == "Clip fraction (share of tokens): policy"


def test_validations_by_set_and_source_and_metrics_of_own_losses_are_shown(folder):
    scores = {"heldout": 0.5, "heldout_pass_at_2": 0.75, "heldout/hard": 0.25, "heldout/hard_mean_at_2": 0.125}
    further = {"heldout/hard_failures": 1, "own": 3.0, "curriculum/a/share": 0.5, "curriculum/a/pass_rate": 0.1}
    write_lines(folder, [{"step": 0} | scores, {"step": 1, "time_step": 1.0} | scores | further | {"heldout": 0.25}])
    table = [{"set": "", "source": "", "rows": 4, "greedy": 0.5}, {"set": "", "source": "x", "rows": 2, "greedy": 1.0}]
    (folder / "validation.jsonl").write_text(json.dumps({"step": 1, "table": table}) + "\n" + '{"step": 2, "ta')
    page = write_report(folder).read_text()
    plots = {plot["title"]: plot["lines"] for plot in read_data(page)["plots"]}
    assert plots == {
        "Reward: greedy, held-out prompts": {"heldout": "greedy, held-out prompts"},
        "Validation: held-out rows": {"heldout_pass_at_2": "pass@2"},
        "Validation: hard": {"heldout/hard": "greedy", "heldout/hard_mean_at_2": "mean@2"},
        "Shares of a step's prompts": {"curriculum/a/share": "a"},
        "Pass rates of a step's prompts": {"curriculum/a/pass_rate": "a"},
        "own": {"own": "own"},
    }
    assert "<td>heldout</td><td>0.5</td><td>0.25</td><td>0.5</td><td>0</td>" in page, "before, after, best, its step"
    assert "<h3>After step 1</h3>" in page and "<th>rows</th><th>greedy</th></tr>" in page
    assert "<td>heldout</td><td>x</td><td>2</td><td>1.000</td>" in page


def test_a_number_that_json_cannot_hold_is_no_point(folder):
    lines = [{"step": 1, "time_step": 1.0, "kl": math.nan}, {"step": 2, "time_step": 1.0, "kl": 0.5}]
    write_lines(folder, lines)
    assert read_points(read_data(write_report(folder).read_text()), "kl") == [(2, 0.5)]


def test_a_score_that_is_no_number_is_not_the_best(folder):
    lines = [{"step": step, "heldout": score} for step, score in enumerate((math.nan, 0.5, 0.25))]
    write_lines(folder, lines)
    page = write_report(folder).read_text()
    assert "<td>heldout</td><td>nan</td><td>0.25</td><td>0.5</td><td>1</td>" in page


def test_outages_are_told(folder):
    lost = {"actor rank 0": "died", "rollout engine 1": "stood still"}
    (folder / "outages.jsonl").write_text(json.dumps({"where": "step 2, phase update", "lost": lost}) + "\n")
    page = write_report(folder).read_text()
    assert "<th>outages</th><td>1</td>" in page
    assert "<td>step 2, phase update</td><td>actor rank 0 died, rollout engine 1 stood still</td>" in page


def test_an_episode_is_shown_turn_by_turn(folder):
    """Who wrote what, what learns, rewards, images, forks and failures; what came in between is text, never markup."""
    Image.new("RGB", (4, 4), (200, 0, 0)).save(folder / "crop.png")
    Image.effect_noise((300, 200), 90).convert("RGB").save(folder / "photo.png")
    images = [str(folder / "crop.png"), str(folder / "photo.png"), "gone.png"]
    turns = [
        {"by": "prompt", "text": "Look: ", "learns": False, "reward": 0.0},
        {"by": "model", "text": "<b>left</b>", "learns": True, "reward": 0.25},
        {"by": "environment", "text": "here", "learns": False, "images": images},
        {"by": "environment", "text": "once more", "learns": False, "fork": True},
        {"by": "model", "text": "red", "learns": True, "reward": -1.0},
    ]
    episode = {"prompt": "Look: ", "completion": "", "answer": "red", "reward": -0.75, "version": 3, "turns": turns}
    one_turn = {"prompt": "1+1=", "completion": "2", "answer": "2", "reward": 1.0, "version": 3}
    (folder / "rollouts").mkdir()
    judged = {"verdicts": [{"model": "grader", "value": 0.125, "text": "<i>bad</i>"}]}
    lines = [one_turn, episode | {"outcome": "ok"}, episode | judged | {"outcome": "blocked: turn 1: chat.py:7"}]
    (folder / "rollouts" / "step_000002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(folder).read_text().partition("Sample rollouts")[2]
    completions, *episodes = page.partition("<script")[0].split('<div class="episode">')
    assert '<td class="text">1+1=</td><td class="text">2</td>' in completions and len(episodes) == 2
    rows = episodes[0].split("<tr")[1:]
    by = [row.partition("<th>")[2].partition("</th>")[0] for row in rows]
    assert by == ["prompt", "model", "environment", "", "environment", "model"]
    assert ["learns" in row for row in rows] == [False, True, False, False, False, True]
    assert ["+0.25" in row for row in rows] == [False, True, False, False, False, False] and "-1<" in rows[5]
    assert "&lt;b&gt;left&lt;/b&gt;" in rows[1] and 'class="fork"' in rows[3]
    kinds = re.findall("data:image/(.*?);base64,", rows[2])
    assert kinds == ["png", "jpeg"] and "[gone.png]" in rows[2], "of a drawing PNG is smaller, of a photograph JPEG"
    assert "blocked" not in episodes[0] and '<b class="bad">blocked: turn 1: chat.py:7</b>' in episodes[1]
    assert '<th>grader</th><td class="text">&lt;i&gt;bad&lt;/i&gt;</td><td class="given">0.125</td>' in episodes[1]


def test_samples_are_of_the_first_and_last_steps_that_the_run_has_come_to(folder):
    """Of many; files of later steps are of before the run went back. Half a surrogate in one ends no report."""
    steps = [1, 10, 20, 100, 30, 1_000_000, 2_000_000]
    with RunLog(folder, 10, 0, Trackers([], TrackedRun(folder, 0, {})), RL_LINE) as log:
        sample = {"completion": "2\ud83d", "answer": "2", "reward": 1.0, "version": 3}
        for step in [*steps, 3_000_000]:
            log.rollouts(step, [sample | {"prompt": f"prompt of {step}"}])
        log.step(2_000_000, {})
    (line,) = (folder / "rollouts" / "step_000020.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["completion"] == "2\ud83d"
    page = write_report(folder).read_text()
    shown = [step for step in (*steps, 3_000_000) if f"<h3>Step {step}</h3>" in page and f"prompt of {step}<" in page]
    assert shown == [1, 10, 100, 30, 1_000_000, 2_000_000] and "2&#55357;<" in page


def test_a_report_is_drawn_anew_at_each_validation_and_its_failure_ends_no_run(folder, capsys):
    trackers = Trackers([], TrackedRun(folder, 2, {}))
    with RunLog(folder, 10, 2, trackers, draw=write_report) as log:
        log.step(3, {"reward": 0.5})
        assert not (folder / "report.html").exists()
        for step in (4, 5):
            log.step(step, {"heldout": 0.1 * step, "time_evaluate": 1.0})
            points = read_points(read_data((folder / "report.html").read_text()), "heldout")
            assert points[-1] == (step, pytest.approx(0.1 * step))
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "step_000001.jsonl").write_text("{\n")
        log.step(6, {"heldout": 0.5, "time_evaluate": 1.0})
        log.draw_report()
    assert capsys.readouterr().out.count("WARNING report: it could not be drawn, and the run goes on: JSONDecode") == 2


def test_a_sample_may_have_any_character_at_which_a_line_may_end(folder):
    said = "two\u2028lines\u2029of\x85text"
    with RunLog(folder, 10, 2, Trackers([], TrackedRun(folder, 2, {}))) as log:
        log.rollouts(2, [{"prompt": "1+1=", "completion": said, "answer": "2", "reward": 1.0, "version": 3}])
    assert said in write_report(folder).read_text()


def test_the_first_and_the_last_validation_are_shown_by_set_and_source(folder):
    def line(step: int, greedy: float) -> str:
        both = {"source": "", "rows": 2, "greedy": greedy, "pass_at_4": 0.5}
        rows = [{"set": "", **both}, {"set": "aime", **both}, {"set": "aime", **both, "source": "2024"}]
        return json.dumps({"step": step, "table": rows}) + "\n"

    (folder / "validation.jsonl").write_text(line(0, 0.25) + line(10, 0.375) + line(20, 0.75) + line(30, 0.9)[:40])
    page = write_report(folder).read_text()
    assert re.findall("<h.>(After.*?|Held-out rows)<", page) == ["Held-out rows", "After step 0", "After step 20"]
    assert "<tr><th>set</th><th>source</th><th>rows</th><th>greedy</th><th>pass@4</th></tr>" in page
    assert "<tr><td>aime</td><td>2024</td><td>2</td><td>0.750</td><td>0.500</td></tr>" in page
    assert "<td>heldout</td><td></td><td>2</td><td>0.250</td>" in page


def test_tokens_of_images_are_folded(folder):
    """Two images of hundreds of tokens hid the question between them."""
    pads = "<|vision_start|>" + "<|image_pad|>" * 300 + "<|vision_end|>"
    write_samples(folder, range(1, 2), f"{pads}{pads}How many? <IMG_CONTEXT><IMG_CONTEXT>" + "[IMG]" * 5)
    page = write_report(folder).read_text()
    shown = "&lt;|vision_start|&gt;&lt;|image_pad|&gt; x 300&lt;|vision_end|&gt;"
    assert f"{shown}{shown}How many? &lt;IMG_CONTEXT&gt;&lt;IMG_CONTEXT&gt;[IMG] x 5" in page
    assert page.count("image_pad") == 2 * 8 * 8, "once for each image of each turn"
    assert "characters are left out" not in page


def test_a_constant_is_drawn_where_it_is(folder):
    """plotly draws a constant of 1e-6 between -1 and 1, where it looks like 0."""
    lines = [{"step": step, "time_step": 2.0, "lr": 1e-6, "reward": 0.1 * step, "penalty": -0.5} for step in (1, 2, 3)]
    write_lines(folder, [line | {"kl": 0.0, "logprob_diff_mean": 1e-7} for line in lines])
    plots = {next(iter(plot["lines"])): plot for plot in read_data(write_report(folder).read_text())["plots"]}
    assert plots["lr"]["range"] == [0.0, 2e-6] and plots["penalty"]["range"] == [-1.0, 0.0]
    assert plots["reward"]["range"] is None and plots["kl"]["range"] is None
    assert "layout.yaxis.range = plot.range" in (folder / "report.html").read_text()


def test_a_title_says_nothing_twice(folder):
    lines = [{"step": 1, "time_step": 2.0, "lr": 1e-6, "grad_norm": 1.0, "clip_fraction": 0.1, "memory_gb": 2.0}]
    write_lines(folder, lines)
    titles = [plot["title"] for plot in read_data(write_report(folder).read_text())["plots"]]
    assert titles == [
        "Clip fraction (share of tokens): policy",
        "Gradient norm before clipping",
        "Learning rate",
        "Largest memory of a process (GB): training",
    ]
