"""Several machines, each a namespace: what a run over them computes, and what is refused before its first step."""

import json
import os
import shlex
import time
from pathlib import Path
from threading import Thread

import pytest
from support.ranks.nodes import Nodes, nodes

from recipes.common.addition import make_data, make_model

PROGRAM = "tests/support/ranks/node_run.py"
UNTIMED = ("time", "second", "memory", "tokens_per", "restarts")


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


def run_on_first(cluster: Nodes, inputs: Path, run: str, **settings) -> None:
    cluster.run(1, f"python -W ignore {PROGRAM} {inputs} {run} {shlex.quote(json.dumps(settings))}")


def kill_after(cluster: Nodes, node: int, metrics: Path, lines: int) -> None:
    while not metrics.exists() or len(metrics.read_text().splitlines()) < lines:
        time.sleep(0.05)
    cluster.kill(node)


@pytest.mark.product
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sizes", [{"ranks": 2}, {"ranks": 4, "tp": 2, "pp": 2}], ids=["dp2", "tp2-pp2"])
def test_two_nodes_compute_what_one_does(inputs, sessions, sizes):
    for count, cpus in ((2, 3), (1, 6)):
        with nodes(count, sessions, cpus) as cluster:
            run_on_first(cluster, inputs, f"on{count}", sizes=sizes)
    metrics = read_metrics(inputs / "on2")
    assert metrics == read_metrics(inputs / "on1")
    assert metrics[-1]["step"] == 2 and metrics[-1]["grad_norm"] > 0


@pytest.mark.product
@pytest.mark.timeout(1800)
def test_a_node_that_dies_is_made_up_for_by_a_free_one(inputs, sessions):
    # Nodes are filled in order: two engines on the first, the third engine and the rank on the second.
    settings = {"sizes": {"ranks": 1}, "engines": 3, "steps": 5, "restarts": 2}
    with nodes(3, sessions, cpus=2) as cluster:
        run_on_first(cluster, inputs, "whole", **settings)
        killing = Thread(target=kill_after, args=(cluster, 2, inputs / "lost" / "metrics.jsonl", 4))
        killing.start()
        run_on_first(cluster, inputs, "lost", **settings)
        killing.join()
    outages = [json.loads(line)["lost"] for line in (inputs / "lost" / "outages.jsonl").read_text().splitlines()]
    assert {name for lost in outages for name in lost} == {"rollout engine 2", "actor rank 0"}, outages
    assert read_metrics(inputs / "lost") == read_metrics(inputs / "whole")


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
    no_room = (
        "import ray; ray.init(logging_level='ERROR', log_to_driver=False); "
        "from rlworker.cluster.placement import ResourceRequest, check_room; "
        "check_room([ResourceRequest('actor', 'cpu', 4, 1, 4)])"
    )
    with nodes(2, sessions) as cluster:
        assert cluster.run(1, f'python -c "{ask}"').returncode == 0
        said = cluster.run(1, f'python -c "{no_room}"', check=False).stderr
        assert "placement: actor needs 4 CPUs in one node, and none has them left after 0 of 4" in said, said
        assert "node 10.77.0.1 has 2 of 2 CPUs; node 10.77.0.2 has 2 of 2 CPUs" in said, said
        cluster.add(3, hide=hidden, env={"PYTHONPATH": f"{other}:{Path.cwd()}"})
        cluster.wait_until_up()
        refused = cluster.run(1, f'python -c "{ask}"', check=False)
    said = refused.stderr.splitlines()[-1]
    kind = "rlworker.base.errors.RunError"
    assert refused.returncode and said.startswith(f"{kind}: start: node 10.77.0.3:"), refused.stderr
    for thing in ("model '", "image folder '", "run folder '", "package transformers is 0.0.1, expected"):
        assert thing in said, said
    assert "10.77.0.1" not in said and "10.77.0.2" not in said and "code of rlworker" not in said
    assert not list((inputs / "runs").iterdir())
