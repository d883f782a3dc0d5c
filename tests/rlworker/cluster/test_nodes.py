"""Several machines, each a namespace: what a run over them computes, and what is refused before its first step."""

import json
import os
from pathlib import Path

import pytest
from support.ranks.nodes import nodes

from recipes.common.addition import make_data, make_model

PROGRAM = "tests/support/ranks/node_run.py"
UNTIMED = ("time", "second", "memory", "tokens_per")


@pytest.fixture
def inputs(tmp_path):
    make_data(tmp_path / "data")
    make_model(tmp_path / "model", seed=0)
    return tmp_path


@pytest.fixture
def sessions(tmp_path_factory):
    """A path that is short enough for Ray's sockets."""
    return Path(f"/tmp/rlw{os.getpid()}")


def read_metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(part in k for part in UNTIMED)} for line in lines]


@pytest.mark.product
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sizes", ["2 1 1", "4 2 2"], ids=["dp2", "tp2-pp2"])
def test_two_nodes_compute_what_one_does(inputs, sessions, sizes):
    for count, cpus in ((2, 3), (1, 6)):
        with nodes(count, sessions, cpus) as cluster:
            cluster.run(1, f"python -W ignore {PROGRAM} {inputs} on{count} {sizes}")
    metrics = read_metrics(inputs / "on2")
    assert metrics == read_metrics(inputs / "on1")
    assert metrics[-1]["step"] == 2 and metrics[-1]["grad_norm"] > 0


@pytest.mark.large
@pytest.mark.timeout(600)
def test_a_node_that_lacks_something_is_named_before_the_first_step(inputs, sessions):
    (inputs / "images").mkdir()
    (inputs / "images" / "one.png").write_bytes(b"")
    (inputs / "runs").mkdir()
    hidden = [inputs / "model", inputs / "images", inputs / "runs"]
    ask = (
        "import ray; ray.init(logging_level='ERROR', log_to_driver=False); from pathlib import Path; "
        "from rlworker.cluster.node_checks import check_nodes; "
        f"check_nodes(['{inputs}/model'], ['{inputs}/images'], Path('{inputs}/runs'))"
    )
    other = inputs / "other"  # a Ray node of another environment
    package = other / "transformers-0.0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    with nodes(2, sessions) as cluster:
        assert cluster.run(1, f'python -c "{ask}"').returncode == 0
        cluster.add(3, hide=hidden, env={"PYTHONPATH": f"{other}:{Path.cwd()}"})
        cluster.wait_until_up()
        refused = cluster.run(1, f'python -c "{ask}"', check=False)
    said = refused.stderr.splitlines()[-1]
    assert refused.returncode and said.startswith("rlworker.errors.RunError: start: node 10.77.0.3:"), refused.stderr
    for thing in ("model '", "image folder '", "run folder '", "package transformers is 0.0.1, expected"):
        assert thing in said, said
    assert "10.77.0.1" not in said and "10.77.0.2" not in said and "code of rlworker" not in said
    assert not list((inputs / "runs").iterdir())
