"""The loop that runs ahead, over engines that stand for vLLM's: which requests are made, in which order, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.environments.runners import LocalPool, encode, make_codec, make_rows, make_sample

from engines.batch.samples import Sampling
from rlworker.environments import Episode
from rlworker.environments.record import LostWorker
from rlworker.environments.reward import make_environment

SOON_S = 20.0
SAMPLING = Sampling(2, 1.0, 8, (5, 0, 0), (2,), expected_tokens=4.0)


class _Method:
    """A method as a handle of Ray has it; its result is there at once."""

    def __init__(self, function):
        self.function = function

    def options(self, **_):
        return self

    def remote(self, *args):
        import ray

        return ray.put(self.function(*args))


class Engine:
    """An engine in this process, which answers what it is told to, when it is told to.

    ``gate`` lets answers out; ``asked`` has everything that was handed in; its samples say the length of the prompt.
    """

    def __init__(self, version: int = 0):
        self.asked, self.open, self.aborted, self.seeds, self.version = [], {}, [], [], version
        self.gate = threading.Event()
        for name in ("submit", "take", "abort", "seed"):
            setattr(self, name, _Method(getattr(self, f"_{name}")))

    def _submit(self, requests):
        self.asked += requests
        self.open |= dict(requests)

    def _take(self, timeout_s):
        if not self.gate.wait(0.02):
            return []
        answers = [(key, self.answer(request)) for key, request in self.open.items()]
        self.open.clear()
        return answers

    def _abort(self, keys):
        self.aborted += keys

    def _seed(self, seed):
        self.seeds.append(seed)

    def answer(self, request):
        text = str(len(request.token_ids) % 10)
        return [make_sample(text, version=self.version)] * request.sampling.count


class Rollouts:
    """The engines of a run. ``lose`` replaces one by another, as a driver does that found it lost."""

    def __init__(self, count: int = 1):
        self.workers = [Engine() for _ in range(count)]
        self.serving, self.lost = list(self.workers), []

    def replace_or_raise(self, lost):
        for place in lost:
            self.lost.append(place)
            self.workers[place] = self.serving[place] = Engine(1)


def rate(text, row):
    """Reward by length of the prompt."""
    return float(len(row.prompt))


def wait_until(holds) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def running(cluster):
    """``running(engines, pool)`` -> a loop that runs ahead, and ends with the test; a pool of ``rate`` by default."""

    from rlworker.rollouts.loop import RolloutLoop
    from rlworker.rollouts.requests import RequestQueue

    with ExitStack() as stack:

        def start(rollouts, pool=None, count=1):
            pool = pool or LocalPool(make_environment(rate), count)
            queue = RequestQueue(rollouts, (5, 0, 2))
            return stack.enter_context(RolloutLoop(pool.environment, pool, rollouts, queue, make_codec(), -1.0))

        yield start


def list_rewards(groups):
    return [trajectory.reward for group in groups for trajectory in group]


def test_groups_come_in_the_order_of_their_rows_scored_as_they_become_whole(running):
    rollouts = Rollouts(2)
    loop = running(rollouts)
    rows = make_rows("1", "12", "123", "1234", "12345")
    first, second = (loop.begin(part, SAMPLING) for part in (rows[:3], rows[3:]))
    wait_until(lambda: sum(len(engine.asked) for engine in rollouts.workers) == 5)
    asked = [request for engine in rollouts.workers for _, request in engine.asked]
    assert {len(engine.asked) for engine in rollouts.workers} == {2, 3}, "each has its part"
    assert all(one.sampling == SAMPLING and not one.goes_first for one in asked)
    assert len({*rollouts.workers[0].seeds, *rollouts.workers[1].seeds}) == 2, "random numbers of their own"
    for engine in rollouts.workers[::-1]:
        engine.gate.set()
    groups = loop.wait(second)
    assert [group[0].row.prompt for group in groups] == ["1234", "12345"]
    assert [list_rewards([group]) for group in groups] == [[4.0, 4.0], [5.0, 5.0]]
    groups = loop.wait(first)
    assert [group[0].row.prompt for group in groups] == ["1", "12", "123"]
    assert all(sum(one.turns for one in group) == 2 for group in groups)


def test_what_an_update_waits_for_goes_first_and_the_canary_to_each_engine(running):
    rollouts = Rollouts(2)
    loop = running(rollouts)
    for engine in rollouts.workers:
        engine.gate.set()
    (row,) = make_rows("12")
    found = loop.sample_each([row] * 4, replace(SAMPLING, count=1))
    assert len(found) == 4 and [len(engine.asked) for engine in rollouts.workers] == [2, 2]
    loop.wait(loop.begin([row], SAMPLING, goes_first=True))
    asked = [request for engine in rollouts.workers for _, request in engine.asked]
    assert all(request.goes_first for request in asked)


def test_what_a_lost_engine_was_asked_its_successor_is_asked(running, monkeypatch):
    """The driver replaces it where it waits, and no sooner; then the answers are those of the new one."""
    from ray.exceptions import ActorDiedError

    from rlworker.rollouts import requests as feed

    rollouts = Rollouts(2)
    loop, (first, second) = running(rollouts), rollouts.workers
    batch = loop.begin(make_rows("1", "12", "123", "1234"), SAMPLING)
    wait_until(lambda: len(first.asked) == len(second.asked) == 2)
    get, died = feed.ray.get, ActorDiedError()

    def lose(reference):
        found = get(reference)
        if found == [] and not first.gate.is_set():  # what it was asked has not been answered
            raise died
        return found

    monkeypatch.setattr(feed, "ray", SimpleNamespace(get=lose, wait=feed.ray.wait))
    second.gate.set()
    wait_until(lambda: loop._queue.list_lost().keys() == {0})
    time.sleep(0.1)
    assert rollouts.lost == [] and not batch.is_done, "nobody waits: the trainer is at an update"
    first.gate.set()
    waiting = threading.Thread(target=lambda: wait_until(lambda: rollouts.lost) or rollouts.workers[0].gate.set())
    waiting.start()
    groups = loop.wait(batch)
    waiting.join()
    assert rollouts.lost == [0] and [key for key, _ in rollouts.workers[0].asked] == [key for key, _ in first.asked]
    assert sorted({group[0].completions[0].version for group in groups}) == [0, 1]


def test_an_error_of_an_engine_or_a_pool_is_raised_where_one_waits(running):
    rollouts = Rollouts()
    loop = running(rollouts)
    rollouts.workers[0].answer = lambda request: ValueError("rollout: a request cannot be sampled: too long")
    rollouts.workers[0].gate.set()
    batch = loop.begin(make_rows("1"), SAMPLING)
    with pytest.raises(ValueError, match="too long"):
        loop.wait(batch)
    with pytest.raises(ValueError, match="too long"):
        loop.begin(make_rows("1"), SAMPLING)
    rollouts, pool = Rollouts(), LocalPool(make_environment(rate))
    pool.begin = lambda *_: 1 / 0
    loop = running(rollouts, pool)
    rollouts.workers[0].gate.set()
    with pytest.raises(ZeroDivisionError):
        loop.wait(loop.begin(make_rows("1"), SAMPLING))


def test_a_loop_that_forgets_takes_back_its_requests(running):
    """As a run does that goes back to a checkpoint: samples and replies that come late are nobody's."""
    rollouts, pool = Rollouts(), LocalPool(make_environment(rate))
    loop, (engine,) = running(rollouts, pool), rollouts.workers
    rows = make_rows("1", "12")
    old = loop.begin(rows, SAMPLING)
    wait_until(lambda: len(engine.asked) == 2)
    loop.forget((5, 3, 2))
    wait_until(lambda: len(engine.aborted) == 2 and len(engine.seeds) == 2)
    assert engine.seeds[0] != engine.seeds[1]
    new = loop.begin(rows[1:], SAMPLING)
    engine.gate.set()
    assert [group[0].row.prompt for group in loop.wait(new)] == ["12"] and not old.is_done
    pool.held.add(0)
    late = loop.begin(rows, SAMPLING)
    wait_until(lambda: len(engine.asked) == 5 and pool.replies)
    loop.forget((5, 4, 2))
    pool.held.clear()
    assert len(loop.wait(loop.begin(rows, SAMPLING))) == 2 and not late.is_done and pool.restarts == 2


# -- episodes


async def count_down(policy, row):
    """Sample as often as the prompt says; every observation is one token longer than the one before."""
    episode = Episode(row)
    for turn in range(int(row.prompt)):
        sample = await policy.sample(episode)
        episode.reward(float(turn == int(row.prompt) - 1 and sample.text != ""))
        episode.observe("1" * (turn + 1))
    return episode


def test_an_episode_waits_for_no_other(running):
    """One of four turns ends while another process holds its only turn back; then all are in order."""
    rollouts, pool = Rollouts(), LocalPool(count_down, 2)
    loop = running(rollouts, pool)
    rollouts.workers[0].gate.set()
    pool.held.add(1)
    batch = loop.begin(make_rows("4", "1"), SAMPLING)
    wait_until(lambda: batch.groups[0] is not None)
    assert not batch.is_done
    pool.held.clear()
    groups = loop.wait(batch)
    assert [len(group) for group in groups] == [2, 2] and list_rewards(groups) == [1.0] * 4
    assert [episode.turns for group in groups for episode in group] == [4, 4, 1, 1]
    lengths = [len(piece.token_ids) for piece in groups[0][0].sequences[0]]
    said = len(make_sample("1").token_ids)
    assert lengths == [1, said, 1, said, 2, said, 3, said], "what was observed at the end is nobody's"
    prompts = [len(request.token_ids) for _, request in rollouts.workers[0].asked]
    assert sorted(prompts) == sorted([1, 1, 1, 1, *(2 + said, 4 + 2 * said, 7 + 3 * said) * 2])


def test_an_episode_whose_process_is_lost_runs_again_with_its_samples(running):
    """Those that were drawn meanwhile included: no token is sampled twice, and the records are the same."""
    rollouts, pool = Rollouts(), LocalPool(count_down)
    loop, (engine,) = running(rollouts, pool), rollouts.workers
    batch = loop.begin(make_rows("3"), SAMPLING)
    wait_until(lambda: len(engine.asked) == 2)
    pool.held.add(0)
    engine.gate.set()  # the samples come, and are told to a process that does not reply
    wait_until(lambda: 0 in pool.replies and any(answers for _, answers in pool.messages))
    pool.lose_first()
    pool.replies[0] = LostWorker("environment worker 0", "died", -1)
    pool.held.clear()
    groups = loop.wait(batch)
    assert [len(jobs) for jobs, _ in pool.messages if jobs] == [2, 2], "both ran again"
    assert len(engine.asked) == 6 and [episode.turns for episode in groups[0]] == [3, 3]
    assert list_rewards(groups) == [1.0, 1.0]


async def give_up(policy, row):
    """End while a task of its own waits for a sample."""
    episode = Episode(row)
    await policy.sample(episode)
    episode.observe("11")
    asking = asyncio.create_task(policy.sample(episode))
    await asyncio.sleep(0)
    episode.reward(1.0)
    asking.cancel()
    return episode


def test_a_sample_that_nobody_waits_for_any_more_is_given_up(running):
    rollouts, pool = Rollouts(), LocalPool(give_up)
    loop, (engine,) = running(rollouts, pool), rollouts.workers
    engine.gate.set()
    groups = loop.wait(loop.begin(make_rows("3"), SAMPLING))
    assert list_rewards(groups) == [1.0, 1.0]
    for episode in groups[0]:
        (pieces,) = episode.sequences
        assert [piece.turn for piece in pieces] == [-1, 0], "what stands before it is left out"


def test_a_loop_of_several_turns_that_forgets_begins_in_new_processes(running):
    rollouts, pool = Rollouts(), LocalPool(count_down)
    loop, (engine,) = running(rollouts, pool), rollouts.workers
    loop.begin(make_rows("3"), SAMPLING)
    wait_until(lambda: len(engine.asked) == 2)
    loop.forget((5, 1, 2))
    engine.gate.set()
    groups = loop.wait(loop.begin(make_rows("2"), SAMPLING))
    assert pool.restarts == 1 and len(engine.aborted) == 2
    assert [episode.turns for episode in groups[0]] == [2, 2]
    assert np.array_equal(groups[0][0].row.prompt_ids, encode("2"))
