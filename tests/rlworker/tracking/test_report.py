"""report.html, and a run that cannot draw one."""

import json
import sys

import pytest

from rlworker.tracking.report import tell_report, write_report


@pytest.fixture
def folder(tmp_path):
    """A run folder of two steps."""
    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu"}))
    steps = [{"step": step, "time_step": 2.0, "reward": 0.0625 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return tmp_path


def test_a_run_without_plotly_has_a_note_in_place_of_a_report(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "plotly", None)  # as if it were not installed
        assert f"pip install plotly, then: rlworker report {folder}" in tell_report(folder)
        with pytest.raises(ValueError, match="plotly, which draws it, is not installed"):
            write_report(folder)
        assert not (folder / "report.html").exists()
    assert tell_report(folder) == f"report: {folder / 'report.html'}"
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
