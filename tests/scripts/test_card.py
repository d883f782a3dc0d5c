"""Steps of real sizes on a card, beside their plan and their run in shapes: the script, at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.large
def test_a_step_beside_its_plan_and_its_run_in_shapes(tmp_path):
    command = [sys.executable, "-m", "scripts.simulate.card", "--tiny", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert row["GB in shapes"] == pytest.approx(row["GB planned"], rel=0.1) and row["GB planned"] > 0.003
    assert 0 < row["s forecast"] < 1 and 0 < row["s"] < 5 and row["GB"] == 0, "a CPU's peak is not measured"
