"""Buckets on their way to rollout workers: what overlaps, and what becomes of the rest when a worker fails."""

import os
import time

import pytest

pytestmark = pytest.mark.usefixtures("by_value")


class Receiver:
    """Stands for a rollout worker: it takes a while to load a bucket, and fails or dies at one."""

    def __init__(self, seconds: float = 0.0, fails_at: int | None = None, dies_at: int | None = None):
        self.seconds, self.fails_at, self.dies_at, self.loaded = seconds, fails_at, dies_at, []

    def load_weights(self, bucket: int, version: int, last: bool) -> None:
        if bucket == self.dies_at:
            os._exit(1)
        if bucket == self.fails_at:
            raise ValueError(f"bucket {bucket} is damaged")
        time.sleep(self.seconds)
        self.loaded.append((bucket, version, last, time.time()))

    def get_loaded(self) -> list[tuple[int, int, bool, float]]:
        return self.loaded


@pytest.fixture
def receivers(cluster):
    import ray

    actor = ray.remote(num_cpus=0)(Receiver)
    workers = [actor.remote(0.3), actor.remote(0.0, 2)]
    ray.get([worker.__ray_ready__.remote() for worker in workers])
    yield workers
    for worker in workers:
        ray.kill(worker)


def make_buckets(made: list[float]):
    for bucket in range(5):
        made.append(time.time())
        yield bucket, bucket == 4


def test_a_bucket_is_made_while_the_one_before_is_loaded(receivers):
    import ray

    from rlworker.cluster.weights.sender import send_buckets

    made = []
    send_buckets(make_buckets(made), receivers[:1], 7)
    loaded = ray.get(receivers[0].get_loaded.remote())
    assert [each[:3] for each in loaded] == [(bucket, 7, bucket == 4) for bucket in range(5)]
    ends = [end for *_, end in loaded]
    assert all(made[i + 1] < ends[i] for i in range(4)), "the next one is made beside it"
    assert all(made[i + 2] >= ends[i] for i in range(3)), "and no third"


def test_after_a_failure_no_more_is_sent_and_all_is_made(receivers):
    """The other ranks of a trainer take part in making each bucket."""
    import ray

    from rlworker.cluster.weights.sender import send_buckets

    made = []
    with pytest.raises(ray.exceptions.RayError, match="bucket 2 is damaged"):
        send_buckets(make_buckets(made), receivers, 7)
    assert len(made) == 5
    assert [bucket for bucket, *_ in ray.get(receivers[0].get_loaded.remote())] == [0, 1, 2, 3]


def test_a_worker_that_dies_is_left_out(cluster, receivers):
    import ray

    from rlworker.cluster.weights.sender import send_buckets

    dying = ray.remote(num_cpus=0)(Receiver).remote(dies_at=1)
    made = []
    send_buckets(make_buckets(made), [dying, receivers[0]], 7)
    assert len(made) == 5
    assert [bucket for bucket, *_ in ray.get(receivers[0].get_loaded.remote())] == [0, 1, 2, 3, 4]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(dying.get_loaded.remote())


class Member:
    """Stands for a rollout worker in a transfer: it notes the steps that it is asked to take, and dies at one."""

    def __init__(self, devices: int, dies_at: str = ""):
        self.devices, self.dies_at, self.steps = devices, dies_at, []

    def describe_receiver(self) -> tuple[str, int]:
        return "gloo", self.devices

    def transfer(self, step: str, info: dict) -> None:
        if info.get("is bad"):
            raise ValueError("bad")
        if step == self.dies_at:
            os._exit(1)
        self.steps.append((step, info))

    def begin_transfer(self, version: int) -> None:
        self.steps.append(("begin", version))

    def end_transfer(self, version: int, checksums: dict) -> None:
        if self.dies_at == "end":
            os._exit(1)
        self.steps.append(("end", version, checksums))

    def get_steps(self) -> list:
        return self.steps


def test_all_workers_take_the_steps_of_a_transfer_and_one_that_dies_ends_it(cluster):
    import ray

    from rlworker.cluster.weights.client import EnginesLostError, TransferClient
    from rlworker.cluster.weights.receiver import Receiver, find_receivers

    actor = ray.remote(num_cpus=0)(Member)
    members = [actor.remote(2), actor.remote(1, "update_weights")]
    receivers = find_receivers(members)
    assert receivers == [Receiver(members[0], "gloo", 2), Receiver(members[1], "gloo", 1)]
    client, deferring = TransferClient(receivers, False), TransferClient(receivers[:1], True)
    client.version = 3
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 4})
    client.start_weight_update()
    (_, first), begin = ray.get(members[0].get_steps.remote())
    (_, second), _ = ray.get(members[1].get_steps.remote())
    assert (first["rank_offset"], second["rank_offset"], begin) == (1, 3, ("begin", 3))
    with pytest.raises(ray.exceptions.RayError, match="bad"):
        client.update_weights({"is bad": True})
    with pytest.raises(EnginesLostError):
        client.update_weights({})
    assert find_receivers(members) == receivers[:1]
    client.finish_weight_update()  # the lost one is for whoever asks it next
    assert ray.get(members[0].get_steps.remote())[-1] == ("end", 3, {})
    deferring.update_weights({"is bad": True})
    deferring.start_weight_update()
    dying = TransferClient([Receiver(actor.remote(1, "end"), "gloo", 1)], True)
    dying.finish_weight_update()
    assert dying.failure is None, "the others have the weights, and may not get them again"
    assert "bad" in str(deferring.failure) and ray.get(members[0].get_steps.remote())[-1] == ("end", 3, {})
