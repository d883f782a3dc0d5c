"""Outages are counted, told, bounded and repaired; ``tests/outages.py`` causes more of them."""

import json

import kill_chain
import pytest
from outages import cause_outage

from recipes.common.addition import make_data, make_model
from rlworker.base.errors import RunError

WHERE, LOST = "step 2, phase update", {"actor rank 0": "died"}


@pytest.fixture
def make_outages(tmp_path):
    from rlworker.trainers.outages import Outages

    return lambda limit: Outages(limit, tmp_path)


@pytest.fixture
def died():
    from rlworker.cluster.watch import WorkerFailure

    return WorkerFailure(f"{WHERE}: actor rank 0 died", WHERE, LOST)


def run_failing(*errors: Exception):
    left = list(errors)

    def run() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return run


def test_a_run_goes_back_as_often_as_it_may(make_outages, died, tmp_path):
    outages, went_back = make_outages(2), []
    assert outages.repeat(run_failing(died, died), lambda: went_back.append(1)) == "done"
    assert len(went_back) == 2 and outages.count() == {"restarts": 2}
    line = {"where": WHERE, "lost": LOST}
    assert [json.loads(text) for text in (tmp_path / "outages.jsonl").read_text().splitlines()] == [line, line]


def test_the_last_outage_names_all(make_outages, died):
    named = (
        r"^step 2, phase update: actor rank 0 died. It would be restart 3 of at most 2, after \(1\) step 2.*; \(2\) "
        r"step 2, phase update: actor rank 0 died. .*--recovery.restarts. .*--resume$"
    )
    with pytest.raises(RunError, match=named):
        make_outages(2).repeat(run_failing(died, died, died), lambda: None)


def test_none_is_repaired_where_none_may_be_or_where_it_would_come_again(make_outages, died):
    raised = type(died)(f"{WHERE}: KeyError", WHERE, {})
    for limit, error in ((0, died), (2, raised)):
        outages = make_outages(limit)
        with pytest.raises(type(died)) as failure:
            outages.repeat(run_failing(error), lambda: None)
        assert failure.value is error and outages.count() == {}


def test_going_back_may_fail_too(make_outages, died):
    """As an outage of its own; engines of the first one that are replaced meanwhile are not counted again."""
    outages, failures = make_outages(3), [died]

    def go_back() -> None:
        outages.note_lost(LOST)  # known
        if failures:
            raise failures.pop()
        outages.where = "step 1, phase restore"
        outages.note_lost({"rollout engine 1": "died"})  # new

    assert outages.repeat(run_failing(died), go_back) == "done"
    assert [text.partition(":")[0] for text in outages.told] == [WHERE] * 2 + ["step 1, phase restore"]
    with pytest.raises(RunError, match="restart 4 of at most 3"):
        outages.note_lost(LOST)  # once more, after it was replaced


@pytest.mark.large
@pytest.mark.timeout(600)
def test_a_run_that_loses_processes_ends_as_if_it_had_not(cluster, tmp_path, measured):
    import ray

    ray.cloudpickle.register_pickle_by_value(kill_chain)  # whose reward the workers cannot import
    make_data(tmp_path / "data")
    make_model(tmp_path / "model", seed=0)
    for name in ("engine-sync", "rank-save"):
        seconds = cause_outage(tmp_path, name)
        times = {f"{name}: seconds until {what}": seconds[what] for what in ("named", "replaced")}
        measured(times)
