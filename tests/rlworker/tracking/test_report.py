"""report.html, and a run that cannot draw one."""

import json
import sys

import pytest

from rlworker.tracking.report import format_report, write_report


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu"}))
    steps = [{"step": step, "time_step": 2.0, "reward": 0.0625 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return tmp_path


def test_a_run_without_plotly_has_a_note_in_place_of_a_report(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "plotly", None)  # as if it were not installed
        assert f"pip install plotly, then: rlworker report {folder}" in format_report(folder)
        with pytest.raises(ValueError, match="plotly, which draws it, is not installed"):
            write_report(folder)
        assert not (folder / "report.html").exists()
    assert format_report(folder) == f"report: {folder / 'report.html'}"
    page = (folder / "report.html").read_text()
    assert '"name":"sampled, training prompts"' in page and '"y":[0.0625,0.125]' in page


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        write_report(tmp_path)


def test_outages_are_told(folder):
    lost = {"actor rank 0": "died", "rollout engine 1": "stood still"}
    (folder / "outages.jsonl").write_text(json.dumps({"where": "step 2, phase update", "lost": lost}) + "\n")
    page = write_report(folder).read_text()
    assert "<th>outages</th><td>1</td>" in page
    assert "<td>step 2, phase update</td><td>actor rank 0 died, rollout engine 1 stood still</td>" in page


def test_an_episode_is_shown_turn_by_turn(folder):
    """Who wrote what, what learns, rewards, images, forks and failures; what came in between is text, never markup."""
    from PIL import Image

    Image.new("RGB", (4, 4), (200, 0, 0)).save(folder / "crop.png")
    turns = [
        {"by": "prompt", "text": "Look: ", "learns": False, "reward": 0.0},
        {"by": "model", "text": "<b>left</b>", "learns": True, "reward": 0.25},
        {"by": "environment", "text": "here", "learns": False, "images": [str(folder / "crop.png"), "gone.png"]},
        {"by": "environment", "text": "once more", "learns": False, "fork": True},
        {"by": "model", "text": "red", "learns": True, "reward": -1.0},
    ]
    episode = {"prompt": "Look: ", "completion": "", "answer": "red", "reward": -0.75, "version": 3, "turns": turns}
    one_turn = {"prompt": "1+1=", "completion": "2", "answer": "2", "reward": 1.0, "version": 3}
    (folder / "rollouts").mkdir()
    lines = [one_turn, episode | {"outcome": "ok"}, episode | {"outcome": "blocked: turn 1: chat.py:7"}]
    (folder / "rollouts" / "step_000002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(folder).read_text().partition("Sample rollouts")[2]
    completions, *episodes = page.partition("<h2>Configuration")[0].split('<div class="episode">')
    assert '<td class="text">1+1=</td><td class="text">2</td>' in completions and len(episodes) == 2
    rows = episodes[0].split("<tr")[1:]
    by = [row.partition("<th>")[2].partition("</th>")[0] for row in rows]
    assert by == ["prompt", "model", "environment", "", "environment", "model"]
    assert ["learns" in row for row in rows] == [False, True, False, False, False, True]
    assert ["+0.25" in row for row in rows] == [False, True, False, False, False, False] and "-1<" in rows[5]
    assert "&lt;b&gt;left&lt;/b&gt;" in rows[1] and 'class="fork"' in rows[3]
    assert rows[2].count("data:image/png;base64,") == 1 and "[gone.png]" in rows[2]
    assert "blocked" not in episodes[0] and '<b class="bad">blocked: turn 1: chat.py:7</b>' in episodes[1]


def test_samples_are_of_the_first_and_last_steps_that_the_run_has_come_to(folder):
    """Of many; files of later steps are of before the run went back. Half a surrogate in one ends no report."""
    from rlworker.tracking.log import RL_LINE, RunLog
    from rlworker.tracking.trackers import TrackedRun, Trackers

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


def test_the_first_and_the_last_validation_are_shown_by_set_and_source(folder):
    def line(step: int, greedy: float) -> str:
        both = {"source": "", "rows": 2, "greedy": greedy, "pass_at_4": 0.5}
        rows = [{"set": "", **both}, {"set": "aime", **both}, {"set": "aime", **both, "source": "2024"}]
        return json.dumps({"step": step, "table": rows}) + "\n"

    (folder / "validation.jsonl").write_text(line(0, 0.25) + line(10, 0.375) + line(20, 0.75) + line(30, 0.9)[:40])
    page = write_report(folder).read_text()
    assert "<h3>After step 0</h3>" in page and "<h3>After step 20</h3>" in page and "step 10<" not in page
    assert "<tr><th>set</th><th>source</th><th>rows</th><th>greedy</th><th>pass@4</th></tr>" in page
    assert "<tr><td>aime</td><td>2024</td><td>2</td><td>0.750</td><td>0.500</td></tr>" in page
    assert "<td>heldout</td><td></td><td>2</td><td>0.250</td>" in page
