"""The simulation of a large cluster: every call that a step makes of its workers, and buckets by the engines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
MB = 2**20


@pytest.mark.parametrize(("engines", "megabytes"), [(1, 64), (16, 64), (31, 64), (32, 128), (128, 512), (1024, 512)])
def test_buckets_grow_with_the_engines(engines, megabytes):
    from rlworker.cluster.train_group import choose_bucket_bytes

    assert choose_bucket_bytes(engines) == megabytes * MB


def test_a_lost_host_is_described_for_each_worker_that_it_stands_for():
    import ray

    from rlworker.cluster.process_state import explain
    from scripts.simulate.stand_ins import StandIn

    host = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "cd"))
    error = ray.exceptions.OutOfMemoryError("Selected to kill: (Actor(cd): job ID=01, actual memory used=9.31GB)")
    assert "memory monitor, holding 9.31 GiB" in (explain(error, StandIn(host, 3)) or "")


@pytest.mark.large
@pytest.mark.timeout(280)
def test_a_step_calls_each_worker_as_often_as_it_must(tmp_path):
    """56 ranks compute the canary's logprobs, an update and a sync; 8 engines sample, tell their way of weights and
    their version, score the canary and digest their weights; the memory of all is measured."""
    command = [sys.executable, "-m", "scripts.simulate.cluster", "--tiny", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert row["calls"] == 3 * 56 + 5 * 8 + 64
    assert row["buckets"] == -(-2 * 8_190_735_360 // (64 * MB))  # Qwen3-8B's weights in bfloat16
    assert row["store MB"] >= row["buckets"] and row["sync s"] > row["sync"] and row["driver CPU s"] > 0
