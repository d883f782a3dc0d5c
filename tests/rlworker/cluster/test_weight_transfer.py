"""Weights by vLLM's weight transfer over gloo: the bits that buckets bring, and an update that breaks off anywhere."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from support.rollout_workers import Prompt, ask, draw, find_unlike, send

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from engines.weight_digest import DigestPlan
from hardware.platforms import get_platform

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("by_value")]
CONFIG = VllmConfig(max_new_tokens=8, max_model_len=64, max_num_seqs=8, kv_cache_mb=64, weight_transfer="gloo")
PROMPTS = [Prompt((3, 4, 5)), Prompt((7, 8, 9, 10))]
CHUNK = 50_000
"""So few bytes that an update of the model takes several chunks."""


class Trainer:
    """Stands for a training rank that exports weights, and is struck at half of them, after some whole exports."""

    is_leader, dp_rank = True, 0

    def __init__(self, folder: str, seed: int, strike: Callable[[], None] = lambda: None, after: int = 0):
        self.folder, self.seed, self.strike, self.left = folder, seed, strike, after

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        torch.manual_seed(self.seed)
        weights, names = SafetensorsFolder(self.folder), sorted(ModelSpec.from_folder(self.folder).list_hf_names())
        for number, name in enumerate(names):
            if number == len(names) // 2 and not self.left:
                self.strike()
            yield name, weights[name] * 1.1 + 0.02 * torch.randn(weights[name].shape)
        self.left -= 1


@pytest.fixture
def sender():
    from rlworker.cluster.weights.sender import WeightSender

    sender = WeightSender(get_platform("cpu"))
    yield sender
    sender.close()


@pytest.fixture
def start(cluster, make_hf_model):
    """``start(tp, ...)`` -> a worker with an engine of so many devices for each."""
    from rlworker.cluster.worker_pool import end_workers, start_workers
    from rlworker.cluster.workers import RolloutWorker

    workers, model = [], ModelSpec.from_folder(make_hf_model("qwen2", True))

    def start(*sizes: int) -> list:
        for tp in sizes:
            workers.extend(start_workers(RolloutWorker, "cpu", [(len(workers), tp)], tp))
            ask(workers[-1].start, model, replace(CONFIG, tp=tp))
        return workers

    yield start
    end_workers(workers, keep=False)


def sync(sender, trainer: Trainer, workers: list, version: int) -> dict | None:
    from rlworker.cluster.weights.receiver import find_receivers

    return sender.sync(trainer, find_receivers(workers), version, CHUNK, DigestPlan("float32"))


def export(folder: str, seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(Trainer(folder, seed).export_weights())


def test_it_brings_the_bits_of_buckets(start, sender, make_hf_model, monkeypatch):
    """To an engine of one device and to an engine of two, in one group; what is damaged on the way is refused."""
    import ray

    folder, workers = make_hf_model("qwen2", True), start(1, 2)
    for version in (1, 2):
        assert len(sync(sender, Trainer(folder, version), workers, version)) == len(export(folder, version))
        assert [find_unlike(worker, export(folder, version)) for worker in workers] == [set(), set()]
        assert [ask(worker.get_version) for worker in workers] == [version, version]
    sampling = Sampling(2, 1.0, 8, (1,), ())
    sampled = draw(workers[0], PROMPTS, sampling)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ray.exceptions.RayError, match=r"(\d+) of \1 .* damaged on the way"),
    ):
        patch.setattr("engines.vllm.transfer.checksum", lambda tensor: 1)
        sync(sender, Trainer(folder, 3), workers, 3)
    assert [ask(worker.get_version) for worker in workers] == [2, 2]
    with pytest.raises(ray.exceptions.RayError, match="version 2 was sent to an engine that has version 2"):
        sync(sender, Trainer(folder, 3), workers, 2)
    assert send(workers[0], export(folder, 2), CHUNK) == 3, "in buckets, after an update that broke off"
    assert draw(workers[0], PROMPTS, sampling) == [replace(one, spans=((3, 8),)) for one in sampled], "bit for bit"
    assert sync(sender, Trainer(folder, 4), workers, 4)
    assert [find_unlike(worker, export(folder, 4)) for worker in workers] == [set(), set()]


def test_an_update_goes_on_without_an_engine_or_sender_that_is_lost(start, sender, make_hf_model):
    import ray

    folder, workers = make_hf_model("qwen2", True), start(1, 1)
    assert sync(sender, Trainer(folder, 1), workers, 1)
    pid = ask(workers[0].__ray_call__, lambda worker: os.getpid())
    assert sync(sender, Trainer(folder, 2, lambda: os.kill(pid, signal.SIGKILL)), workers, 2) is None
    assert ask(workers[1].get_version) == 1, "the half that came counts for nothing"
    assert sync(sender, Trainer(folder, 2), workers, 2)
    assert find_unlike(workers[1], export(folder, 2)) == set()

    def lose(_) -> None:
        from rlworker.cluster.weights.sender import WeightSender

        own = WeightSender(get_platform("cpu"))
        sync(own, Trainer(folder, 3, lambda: os._exit(1), after=1), workers[1:], 3)  # the first is for names and sizes

    with pytest.raises(ray.exceptions.RayError):
        ray.get(ray.remote(max_retries=0)(lose).remote(None))
    assert ask(workers[1].get_version) == 2
    sender.close()  # like a new one, which replaces the lost one
    assert sync(sender, Trainer(folder, 4), workers, 3)
    assert find_unlike(workers[1], export(folder, 4)) == set() and ask(workers[1].get_version) == 3
