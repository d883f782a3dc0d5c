"""Workers that are handed on from run to run: which are kept, which are ended, and that a kept one trains as a new."""

import os
import time
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.usefixtures("by_value")


class Worker:
    """Stands for an engine's process: it closes well, not at all, or too late."""

    def __init__(self, platform: str, how: str):
        self.how = how

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self.how == "raises":
            raise RuntimeError("half an update is left")
        if self.how == "hangs":
            time.sleep(60)


def used(*how: str, keep: bool = True) -> list[int]:
    """Start workers, ask each for its process, end them."""
    import ray

    from rlworker.cluster.worker_pool import end_workers, start_workers

    workers = start_workers(Worker, "cpu", [(each,) for each in how])
    pids = ray.get([worker.pid.remote() for worker in workers])
    end_workers(workers, keep)
    return pids


@pytest.fixture
def keeping(cluster, monkeypatch):
    options = SimpleNamespace(ray_options={"num_cpus": 0})  # beside the workers that the other tests keep
    monkeypatch.setattr("rlworker.cluster.worker_pool.get_platform", lambda name: options)
    from rlworker.cluster.worker_pool import keeping_workers

    with keeping_workers():
        yield


def test_a_worker_is_handed_on_to_a_run_that_asks_for_its_like(keeping):
    first, other = used("well", "other")
    assert used("other", "well") == [other, first]
    two = used("well", "well")
    assert two[0] == first and two[1] != first, "one worker serves one run at a time"
    assert set(used("well", "well")) == set(two)


def test_after_a_failure_none_is_kept(keeping):
    (first,) = used("well", keep=False)
    assert used("well") != [first]


@pytest.mark.large
def test_one_that_does_not_close_is_ended(keeping, monkeypatch):
    monkeypatch.setattr("rlworker.cluster.worker_pool._CLOSE_S", 1.0)
    raising, hanging, well = used("raises", "hangs", "well")
    again = used("raises", "hangs", "well")
    assert again[2] == well and again[0] != raising and again[1] != hanging


@pytest.mark.large
def test_those_without_a_run_give_way_where_there_is_no_room_for_others(keeping, monkeypatch):
    monkeypatch.setattr("rlworker.cluster.worker_pool.list_ray_resources", lambda platform, devices: {"place": devices})
    monkeypatch.setattr("ray.cluster_resources", lambda: {"place": 3.0})
    first = used("well", "well")
    assert used("other", "well")[1] in first, "there is a third place"
    again = used("another", "well")
    assert again[1] in first, "what is taken up again is not among those that must go"
    last = used("well", "well")
    assert last[0] == again[1] and last[1] not in first, "the other one that was kept went"


def test_outside_and_after_it_none_is_kept(keeping):
    from rlworker.cluster.worker_pool import keeping_workers

    with keeping_workers():
        (kept,) = used("well")
        with keeping_workers():
            assert used("well") != [kept], "its own"
        assert used("well") == [kept]
    with keeping_workers():
        assert used("well") != [kept], "ended with what kept it"
