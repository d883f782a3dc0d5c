"""Shared devices: what is on them in each phase, that no number changes, and calls out of turn."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kill_chain import compare_ends, make_config, read_metrics_without_times

from engines.batch.samples import Request
from engines.vllm.sleep import Sleep
from recipes.common.addition import make_data, make_model
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.sections import CheckpointConfig, CriticConfig, PlacementConfig, RecoveryConfig


class Device:
    """Stands for the engines of both sides: what is on the device, and after which call."""

    def __init__(self):
        self.held = {"actor": {"weights", "gradients", "optimizer"}, "critic": {"weights", "gradients", "optimizer"}}
        self.held["engines"] = set()
        self.seen: list[dict] = []

    def make_group(self, name: str):
        def call(method, parts) -> None:
            held, is_onload = self.held[name], method.__name__ == "onload"
            (held.update if is_onload else held.difference_update)(parts)
            self.note()

        return SimpleNamespace(call=call)

    def call(self, method, argument) -> None:
        if method.__name__ == "wake":
            self.held["engines"].update(argument)
        else:
            assert argument in (1, 2)
            self.held["engines"].clear()
        self.note()

    call_alive = call

    def note(self) -> None:
        trainers = self.held["actor"] | self.held["critic"]
        assert "kv_cache" not in self.held["engines"] or not trainers & {"gradients", "optimizer"}
        assert not self.held["engines"] or "weights" not in self.held["critic"]
        self.seen.append({name: set(held) for name, held in self.held.items()})


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def devices(device):
    from rlworker.trainers.shared_devices import SharedDevices

    devices = SharedDevices()
    devices.groups = {name: device.make_group(name) for name in ("actor", "critic")}
    devices.begin(device)
    device.held["engines"] = {"weights", "kv_cache"}  # as they start
    return devices


def test_what_is_on_the_devices_in_each_phase(devices, device):
    every = {"weights", "gradients", "optimizer"}
    expected = {
        "evaluate": (set(), set(), {"weights", "kv_cache"}),
        "reward": (set(), set(), {"weights", "kv_cache"}),
        "update": (every, every, set()),
        "sync": ({"weights"}, set(), {"weights"}),
        "canary": ({"weights"}, set(), {"weights", "kv_cache"}),
        "save": ({"weights", "optimizer"}, {"weights", "optimizer"}, set()),
        "rollout": (set(), set(), {"weights", "kv_cache"}),
    }
    for phase, (actor, critic, engines) in expected.items():
        devices.take(phase)
        assert device.held == {"actor": actor, "critic": critic, "engines": engines}, phase
    calls = len(device.seen)
    devices.take("rollout")
    assert len(device.seen) == calls, "nothing moves within a turn"


def test_new_engines_find_the_devices_free(devices, device):
    for phase, weights in (("rollout", set()), ("canary", {"weights"})):
        devices.take(phase)
        devices.free_devices()
        assert device.held["actor"] == device.held["critic"] == set()
        with devices.lending_weights():
            assert device.held["actor"] == {"weights"} and not device.held["critic"]
        assert device.held["actor"] == weights and device.held["engines"] == {"weights", "kv_cache"}


def test_new_trainers_start_while_the_engines_sleep(devices, device):
    devices.take("sync")
    devices.take("restart")
    assert device.held["engines"] == set()
    for name in ("actor", "critic"):
        device.held[name] = {"weights", "gradients", "optimizer"}
    calls = len(device.seen)
    devices.take("restore")
    assert len(device.seen) > calls, "whatever it was before, everything is asked for"


def test_without_shared_devices_nothing_is_moved():
    from rlworker.trainers.shared_devices import SharedDevices

    devices = SharedDevices()
    devices.groups = {"actor": None}
    devices.take("update")
    devices.free_devices()
    with devices.lending_weights():
        pass


class Llm:
    """Stands for vLLM, which would do nothing to an engine that sleeps, be it half awake."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.asleep: set[str] = set()

    def sleep(self, level: int) -> None:
        assert not self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        assert self.asleep.issuperset(tags)
        self.asleep.difference_update(tags)
        self.calls.append(("wake", *tags))


def test_an_engine_is_asked_for_nothing_out_of_turn():
    llm = Llm()
    state = Sleep(llm, frees=True)
    state.require_weights("generate")
    state.sleep(1)
    state.sleep(2)  # it sleeps already, with its weights kept
    with pytest.raises(RuntimeError, match="generate was called while weights and kv_cache sleep"):
        state.require_weights("generate")
    state.wake(("weights", "kv_cache"))
    state.require_weights("generate")
    state.sleep(2)
    with pytest.raises(RuntimeError, match="load_weights was called while weights sleep"):
        state.require("load_weights", "weights")
    state.wake(("weights",))
    state.require("load_weights", "weights")
    with pytest.raises(RuntimeError, match="generate was called while kv_cache sleep"):
        state.require_weights("generate")
    state.wake(("weights", "kv_cache"))
    with pytest.raises(RuntimeError, match="a sleep of level 2 dropped the weights; send them first"):
        state.require_weights("generate")
    whole, half = ("wake", "weights", "kv_cache"), [("wake", "weights"), ("wake", "kv_cache")]
    assert llm.calls == [("sleep", 1), whole, ("sleep", 2), *half]
    state.sleep(2)
    state.wake(("weights",))
    state.sleep(2)
    assert llm.calls[-4:] == [("sleep", 2), *half, ("sleep", 2)], "half awake it is woken first"


def test_where_vllm_cannot_sleep_the_order_is_kept():
    state = Sleep(None, frees=False)
    state.sleep(2)
    with pytest.raises(RuntimeError, match="sleep"):
        state.require_weights("generate")
    state.wake(("weights", "kv_cache"))


def share_digits(text, row) -> float:
    return sum(c.isdigit() for c in text) / 4


def make_run(folder, name: str, colocate: bool, **changes):
    """Make a run of two ranks and two engines, saved and evaluated on the way; critic and reference are the ranks'."""
    config = make_config(folder, name, steps=3)
    return replace(
        config,
        rollout=replace(config.rollout, engines=2),
        data=replace(config.data, heldout=str(folder / "data" / "heldout.jsonl")),
        critic=CriticConfig(train=True, lr=1e-3),
        algorithm=AlgorithmConfig(kl_coef=0.05),
        checkpoint=CheckpointConfig(save_every=1, keep_newest=0),
        placement=PlacementConfig(colocate=colocate),
        eval_every=2,
        **changes,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cluster, by_value):
    """A folder with the same run apart and together, and what was said of calls out of turn."""
    import ray

    from rlworker.cluster.workers import TrainWorker
    from rlworker.trainers.rl import Trainer

    folder, said = tmp_path_factory.mktemp("devices"), {}
    make_data(folder / "data")
    make_model(folder / "model", seed=0)
    with Trainer(make_run(folder, "apart", False), share_digits) as trainer:
        trainer.fit()
    with Trainer(make_run(folder, "together", True), share_digits) as trainer:
        trainer.fit()
        sampling = trainer.manager.make_sampling(1)
        requests = [Request(row.prompt_ids, sampling) for row in trainer.rows[:2]]
        for name, phase, call in (
            ("forward", "rollout", lambda: trainer.actor.call(TrainWorker.save, "nowhere")),
            ("sample", "update", lambda: trainer.rollouts.sample(requests, sampling.stream)),
            ("dropped", "canary", lambda: trainer.rollouts.sample(requests, sampling.stream)),
        ):
            trainer.devices.take(phase)
            with pytest.raises(ray.exceptions.RayTaskError) as error:
                call()
            said[name] = str(error.value)
    return folder, said


@pytest.mark.large
def test_turns_change_no_number(runs):
    folder, said = runs
    compare_ends(folder, 3, "apart", "together")
    apart = read_metrics_without_times(folder / "apart")
    assert [line["step"] for line in apart] == [0, 1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["critic_grad_norm"] > 0 for line in apart[1:])
    assert ["heldout" in line for line in apart] == [True, False, True, True]
    assert "save was called while weights and optimizer were offloaded" in said["forward"]
    assert "sampling was called while weights and kv_cache sleep" in said["sample"]
    assert "sampling was called, and a sleep of level 2 dropped the weights" in said["dropped"]


@pytest.mark.product
@pytest.mark.parametrize("lost", ["rollout engine 1", "actor rank 1"])
def test_a_run_that_takes_turns_resumes_and_replaces_what_it_lost(runs, lost):
    """Resumed from a run of the other kind after step 1, the reference and half of the optimizers on the host; the
    lost process is killed before the update of step 3."""

    import ray

    from rlworker.trainers.rl import Trainer

    folder, name = runs[0], f"resumed-{lost[0]}"
    shutil.copytree(folder / "apart", folder / name)
    for step in (2, 3):
        shutil.rmtree(folder / name / "checkpoints" / f"step_{step}")

    class Struck(Trainer):
        @contextmanager
        def _phase(self, clock, name):
            if self.has_begun and (name, self.steps_done) == ("update", 2) and not self.outages.told:
                (pid,) = ray.get([self.name_workers()[lost].__ray_call__.remote(lambda _: os.getpid())])
                os.kill(pid, signal.SIGKILL)
            with super()._phase(clock, name):
                yield

    config = make_run(folder, name, True, resume=True, recovery=RecoveryConfig(restarts=1))
    hosted = replace(config.actor, optimizer=replace(config.actor.optimizer, offload_fraction=0.5))
    config = replace(config, actor=hosted, placement=replace(config.placement, cpu_offload=("reference",)))
    with Struck(config, share_digits) as trainer:
        trainer.fit()
    (line,) = (folder / name / "outages.jsonl").read_text().splitlines()
    assert lost in json.loads(line)["lost"]
    assert read_metrics_without_times(folder / name) == read_metrics_without_times(folder / "apart")
