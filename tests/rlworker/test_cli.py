import json
import subprocess
import sys
from pathlib import Path

COMMAND = [str(Path(sys.executable).parent / "rlworker"), "report"]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_report_draws_a_run_cut_short(tmp_path):
    """A run that was killed after its first step still has a report."""
    (tmp_path / "config.json").write_text(json.dumps({"model": "m<script>"}))
    step = {"step": 1, "reward": 0.25, "time_step": 2.0, "time_rollout": 1.5, "time_update": 0.4, "time_wall": 21.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "heldout": 0.5}) + "\n" + json.dumps(step) + "\n")
    done = run(str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip()).read_text()
    body = page[page.index("<body>") :]
    assert "21.5 s" in body and "75.0 %" in body and "heldout_before" in body
    assert "m&lt;script&gt;" in body, "what a run wrote is shown, not run"


def test_a_folder_without_a_run_is_an_error(tmp_path):
    done = run(str(tmp_path))
    assert done.returncode == 1 and "is not a run folder" in done.stderr and "Traceback" not in done.stderr
