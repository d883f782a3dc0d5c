"""Runs that lose processes and go on: each must end with the metrics of the run that lost none.

    python tests/outages.py                            # every one of OUTAGES, NODES and MEMORY, and the control
    python tests/outages.py engine-sync rank-stopped   # some of them
    python tests/outages.py --ahead                    # rollouts run ahead, by one update
    python tests/outages.py --experts                  # a mixture of experts, shared out over the ranks
    python tests/outages.py --transfer engine-sync     # new weights by vLLM's weight transfer, over gloo

Where rollouts run ahead no two runs are equal. Then each step must have the same fields and the same prompts.

Each run has a real Ray, two trainer ranks and two vLLM engines. It is told whom to kill or to stop, and in which step
and phase, or whom to let take memory until Ray's monitor ends it. Workers that were not lost are handed on from run to
run.
"""

import argparse
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from kill_chain import compare_ends, make_config, read_metrics_without_times, reward

from rlworker.base.errors import RunError
from rlworker.config.run import RunConfig, TrainingConfig
from rlworker.config.sections import EnvironmentConfig, RecoveryConfig
from rlworker.config.sft import SftConfig

STEPS = 5
STALL_TIMEOUT_S = 20.0
NAMED_S, NODE_NAMED_S = 10.0, 40.0
"""Seconds until a lost worker is named, beyond the stall timeout for one that stands still; and until a node is, or a
worker that takes memory until it is lost."""
BUCKET_BYTES = 2**16
"""So small that an update of the model takes several."""


@dataclass(frozen=True)
class Outage:
    """A worker that is lost.

    Attributes:
        delay_ms: into the phase; 0 is before it begins. resends: whether a new engine gets the weights.
        supervised: whether the run has no rollouts. eats: takes memory, for which Ray's monitor ends it.
    """

    victim: str
    stops: bool
    step: int
    phase: str
    delay_ms: float = 0.0
    resends: bool = True
    supervised: bool = False
    eats: bool = False


OUTAGES = {
    "engine-generate": Outage("rollout engine 1", False, 3, "rollout", 20),
    "engine-sync": Outage("rollout engine 0", False, 3, "sync", 15),
    "rank-sync": Outage("actor rank 0", False, 3, "sync", 15),
    "engine-canary": Outage("rollout engine 1", False, 3, "canary"),
    "rank-update": Outage("actor rank 1", False, 4, "update", 20),
    "rank-save": Outage("actor rank 0", False, 4, "save", 60),
    "rank-first-step": Outage("actor rank 0", False, 1, "update"),
    "engine-stopped": Outage("rollout engine 0", True, 3, "rollout"),
    "engine-stopped-sync": Outage("rollout engine 1", True, 3, "sync"),
    "rank-stopped": Outage("actor rank 1", True, 3, "update"),
    "rank-supervised": Outage("actor rank 1", False, 4, "update", supervised=True),
    "environment-stopped": Outage("environment worker 0", True, 3, "rollout"),
}
NODES = {"node-rollout": Outage("node", False, 3, "rollout"), "node-update": Outage("node", False, 4, "update")}
"""Outages of all workers of a node, while another one is free. Both are Ray's on this machine, with its address."""
MEMORY = {
    "memory-update": Outage("actor rank 1", False, 4, "update", 20, eats=True),
    "memory-rollout": Outage("rollout engine 0", False, 3, "rollout", eats=True),
}
"""Outages by Ray's memory monitor, which may end others beside the victim. Their Ray has a limit of its own."""
MEMORY_GIB = 7
"""Memory above what the machine uses, at which that Ray's monitor ends workers. The runs take some five of them."""
CONTROL = Outage("rollout engine 1", False, 3, "rollout", resends=False)
EVERY = OUTAGES | NODES | MEMORY
DEFAULTS = {"staleness": 0}


def make_outage_config(
    folder: Path, name: str, supervised: bool = False, rollout: Mapping[str, Any] = DEFAULTS
) -> TrainingConfig:
    """Make the settings of a run, saved after every other step; one of RL has two engines with these settings."""
    config = make_config(folder, name, STEPS)
    recovery = RecoveryConfig(stall_timeout_s=STALL_TIMEOUT_S, restarts=6 if name in MEMORY else 2)
    if not supervised:
        engines, environment = (
            replace(config.rollout, engines=2, **rollout),
            EnvironmentConfig(workers=2, time_limit_s=5.0),
        )
        return replace(config, rollout=engines, recovery=recovery, environment=environment)
    same = {name: getattr(config, name) for name in ("model", "run_dir", "data", "actor", "steps", "checkpoint")}
    return SftConfig(**same, recovery=recovery, rows_per_step=8, max_answer_tokens=8)


def run(config: TrainingConfig, outage: Outage | None, kill_node: Callable[[], None] | None = None) -> dict[str, float]:
    """Run to the end, with a victim that is struck as ``outage`` says. Returns times: struck, named, replaced."""
    import ray

    import rlworker.trainers.rl as rl
    from rlworker.cluster import train_group
    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.cluster.watch import LIVENESS
    from rlworker.trainers.outages import Outages
    from rlworker.trainers.sft import SftTrainer

    def eat(_worker):
        eaten = []
        while True:
            eaten.append(bytearray(b"x" * 2**26))

    times: dict[str, float] = {}
    is_rl = isinstance(config, RunConfig)
    kind: Any = rl.Trainer if is_rl else SftTrainer

    class Struck(kind):
        def start(self):
            super().start()
            if outage and not kill_node:
                self.victim = self.name_workers()[outage.victim]
                (self.pid,) = ray.get([self.victim.__ray_call__.remote(lambda _: os.getpid())])

        def strike(self):
            if kill_node:
                kill_node()
                times["struck"] = time.monotonic()
                return
            times["struck"] = time.monotonic()
            if outage and outage.eats:
                self.victim.__ray_call__.options(concurrency_group=LIVENESS).remote(eat)
                return
            os.kill(self.pid, signal.SIGSTOP if outage and outage.stops else signal.SIGKILL)

        def send_weights(self, engines):
            if not outage or outage.resends:
                super().send_weights(engines)

        @contextmanager
        def _phase(self, clock, name):
            done = self.steps_done if name == "save" else self.steps_done + 1
            if outage and "struck" not in times and self.has_begun and (name, done) == (outage.phase, outage.step):
                if outage.delay_ms:
                    threading.Timer(outage.delay_ms / 1000, self.strike).start()
                else:
                    self.strike()
            with super()._phase(clock, name):
                yield
            if name == "restore" and "named" in times:
                times["replaced"] = time.monotonic()

    note, replace_engines = Outages.note, Rollouts.replace

    def note_named(self, where, lost):
        times.setdefault("named", time.monotonic())
        note(self, where, lost)

    def replace_timed(self, lost):
        replace_engines(self, lost)
        times["replaced"] = time.monotonic()

    make = partial(Struck, config, *([reward] if is_rl else []))
    noting, replacing = patch.object(Outages, "note", note_named), patch.object(Rollouts, "replace", replace_timed)
    with noting, replacing, patch.object(train_group, "choose_bucket_bytes", lambda _: BUCKET_BYTES), make() as trainer:
        trainer.fit()
    return times


def check_whole(run: Path) -> None:
    """Check that the run that lost nobody learned at every step: else a lost update would not show."""
    lines = read_metrics_without_times(run)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line["grad_norm"] > 1e-3 for line in lines[1:]), lines


def compare_ahead(folder: Path, whole: str, name: str) -> None:
    lines = (read_metrics_without_times(folder / run) for run in (whole, name))
    fields = [[{key for key in line if not key.startswith("logprob_diff")} for line in each] for each in lines]
    assert fields[0] == fields[1]
    prompts = [(folder / run / "prompts.jsonl").read_text() for run in (whole, name)]
    assert prompts[0] == prompts[1] and len(prompts[0].splitlines()) == STEPS


def cause_outage(
    folder: Path, name: str, kill_node: Callable[[], None] | None = None, rollout: Mapping[str, Any] = DEFAULTS
) -> dict[str, float]:
    """Cause an outage and compare with the run that lost nobody. Returns the seconds until it was named and repaired.

    Raises:
        AssertionError: the run's metrics or weights differ, or the outage was named late, or another one was.
        RunError: the run did not go on.
    """
    outage = EVERY[name]
    whole = "whole-supervised" if outage.supervised else "whole"
    if not (folder / whole).exists():
        run(make_outage_config(folder, whole, outage.supervised, rollout), None)
        check_whole(folder / whole)
    times = run(make_outage_config(folder, name, outage.supervised, rollout), outage, kill_node)
    lines = (folder / name / "outages.jsonl").read_text().splitlines()
    lost = [json.loads(line)["lost"] for line in lines]
    assert kill_node or any(outage.victim in each for each in lost), lost
    assert not outage.eats or any(outage.victim in each and "monitor" in each[outage.victim] for each in lost), lost
    assert all(json.loads(line)["where"].startswith("step ") for line in lines), lines
    assert f"<th>outages</th><td>{len(lines)}</td>" in (folder / name / "report.html").read_text()
    if rollout["staleness"] and not outage.supervised:
        compare_ahead(folder, whole, name)
    else:
        compare_ends(folder, STEPS, whole, name)
    named = times["named"] - times["struck"]
    limit_s = outage.stops * STALL_TIMEOUT_S + (NODE_NAMED_S if kill_node or outage.eats else NAMED_S)
    assert named < limit_s, f"named after {named:.1f} s"
    seconds = {"replaced": round(times["replaced"] - times["named"], 1)} if "replaced" in times else {}
    return {"lost": lost, "named": round(named, 1)} | seconds


@contextmanager
def open_nodes() -> Iterator[Callable[[], None]]:
    """Connect to a cluster of two nodes that a run fills; yields what kills the one without the driver."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes = [cluster.add_node(num_cpus=2)]
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def kill_node() -> None:
        nodes.append(cluster.add_node(num_cpus=2))
        cluster.remove_node(nodes.pop(0), allow_graceful=False)

    try:
        yield kill_node
    finally:
        ray.shutdown()
        cluster.shutdown()


def check_control(folder: Path, rollout: Mapping[str, Any]) -> str:
    """Check that a new engine which gets no weights is noticed: without that, equal metrics would say little."""
    # Where rollouts run ahead, the next weights may come before anyone waits for what the new engine sampled.
    signs = ("samples of weights [0, ", *(("the rollout engines have [",) if rollout["staleness"] else ()))
    try:
        run(make_outage_config(folder, "control", rollout=rollout), CONTROL)
    except RunError as error:
        assert any(sign in str(error) for sign in signs), error
        return str(error)
    raise AssertionError("nobody noticed the engine without weights")


def cause_all(
    folder: Path, names: list[str], rollout: Mapping[str, Any], kill_node: Callable[[], None] | None = None
) -> None:
    for name in names:
        start, control = time.monotonic(), name == "control"
        result = check_control(folder, rollout) if control else cause_outage(folder, name, kill_node, rollout)
        print(name, result, f"{time.monotonic() - start:.0f} s in all", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*OUTAGES, "control", *NODES, *MEMORY]
    parser.add_argument("names", nargs="*", default=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--ahead", action="store_true", help="let rollouts run ahead, by one update")
    parser.add_argument("--experts", action="store_true", help="of a model with experts, shared out over the ranks")
    parser.add_argument("--transfer", action="store_true", help="send new weights by vLLM's weight transfer")
    options = parser.parse_args()
    if unknown := set(options.names) - set(every):
        parser.error(f"there is no outage {sorted(unknown)[0]}, there are {', '.join(every)}")
    return options


def main(options: argparse.Namespace) -> None:
    from recipes.common.addition import make_data, make_expert_model, make_model
    from rlworker.cluster.ray import running_ray
    from rlworker.cluster.worker_pool import keeping_workers

    rollout = {"staleness": int(options.ahead), "weight_transfer": "gloo" if options.transfer else "auto"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_data(folder / "data")
        (make_expert_model if options.experts else make_model)(folder / "model", seed=0)
        if alone := [name for name in options.names if name not in NODES | MEMORY]:
            with running_ray(8, "cpu"), keeping_workers():
                cause_all(folder, alone, rollout)
        if apart := [name for name in options.names if name in NODES]:
            with open_nodes() as kill_node:
                cause_all(folder, apart, rollout, kill_node)
        if hungry := [name for name in options.names if name in MEMORY]:
            memory = psutil.virtual_memory()
            limit = 1 - memory.available / memory.total + MEMORY_GIB * 2**30 / memory.total
            assert limit < 0.95, "this machine has too little memory left to cause these"
            os.environ |= {"RAY_memory_usage_threshold": f"{limit:.4f}", "RAY_memory_monitor_refresh_ms": "50"}
            with running_ray(8, "cpu"), keeping_workers():
                cause_all(folder, hungry, rollout)


if __name__ == "__main__":
    main(parse_arguments())
