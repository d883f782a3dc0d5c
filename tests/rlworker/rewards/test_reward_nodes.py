"""Reward workers of other nodes: their files are read where they are, and a node that is lost costs no reward.

A second node stands here for itself in all but its address: its files are read by a process of Ray, as on any node
that is not the driver's.
"""

import os
import time

import pytest

from rlworker.config.sections import RewardConfig
from rlworker.data.rows import Row

LIMIT_S = 0.5


def misbehave(text: str, row: Row) -> float:
    """The number that is the text, after a moment; hangs, raises or dies where the row says so."""
    how = row.source.get("how")
    if how == "sleep":
        time.sleep(600)
    if how == "raise":
        raise KeyError("level")
    if how == "die":
        os._exit(0)
    time.sleep(0.05)
    return float(text)


def make_row(how: str | None) -> Row:
    return Row(f"prompt {how}", (1, 2), "answer", {"how": how})


@pytest.fixture
def make_pool(cluster, by_value, monkeypatch):
    """``make(*is_other)`` -> a pool with a worker on each of so many nodes: the driver's, or another."""
    import ray

    from rlworker.rewards import pool, processes, progress

    pools, here = [], ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(pool, "GRACE_S", 1.0)
    monkeypatch.setattr(progress, "_CLOSE_S", 1.0)

    def make(*is_other: bool, output=None):
        nodes = [progress._open_node(f"10.0.0.{place}", here, other) for place, other in enumerate(is_other)]
        monkeypatch.setattr(processes, "find_nodes", lambda count: nodes[:count])
        pools.append(pool.RewardPool(misbehave, RewardConfig(len(nodes), LIMIT_S, -1.0), output))
        return pools[-1]

    yield make
    for each in pools:
        each.stop()


@pytest.mark.large
def test_rewards_and_failures_are_the_same_on_any_nodes(make_pool, tmp_path):
    """Also of calls that hang, whose process is ended on its own node; what is printed goes to a file of each node."""
    how = [None, "sleep", "raise", None, "die", None, None, "sleep", "die", None]
    rows, texts = [make_row(kind) for kind in how], [str(i) for i in range(len(how))]
    expected = [-1.0 if kind else float(i) for i, kind in enumerate(how)]
    for places in ([False], [True], [False, True, True]):
        pool = make_pool(*places, output=tmp_path / "rewards.log")
        scores = pool.score(texts, rows)
        assert scores.values == expected and scores.failures == {"timeout": 2, "raised": 1, "died": 2}, places
        assert [example.text for example in scores.examples] == ["1", "2", "4", "7", "8"]
        pool.stop()
    logs = {path.name for path in tmp_path.iterdir()}
    assert logs == {"rewards.log", *(f"rewards.10.0.0.{place}.log" for place in range(3))}


@pytest.mark.large
def test_what_a_lost_node_was_at_is_done_on_the_others(make_pool, capsys):
    """Its workers and what reads their files end at once, in the middle of a call; the next call goes on without it."""
    import ray

    pool = make_pool(False, True)
    texts, rows = [str(i) for i in range(60)], [make_row(None)] * 60
    here, lost = pool.nodes
    ask, counts_seen = lost.ask, []

    def lose(method, *args):
        counts = ask(method, *args)
        if method == "count_scored" and counts[0] > 0 and not counts_seen:
            counts_seen.append(counts)
            ray.kill(lost.files)
            ray.kill(pool.workers[1])
        return counts

    lost.ask = lose
    assert pool.score(texts, rows).values == [float(text) for text in texts]
    assert counts_seen and pool.nodes == [here] and pool.places == [here, here]
    assert "WARNING reward workers of a lost node begin anew on others" in capsys.readouterr().out
    assert pool.score(texts[:5], rows[:5]).values == [0.0, 1.0, 2.0, 3.0, 4.0]
