"""The stream of draws over engines that stand for vLLM's: who is asked what, in which order, and who is told what."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.episodes.stages import LocalPool, encode, make_codec, make_rows, make_sample

from engines.batch.samples import Completions, Sampling
from rlworker.episodes.episode import Episode

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
        text = str(len(request.prompt.token_ids) % 10)
        return Completions.join([make_sample(text, version=self.version)] * request.count)


class Rollouts:
    """The engines of a run. ``lose`` replaces one by another, as a driver does that found it lost."""

    def __init__(self, count: int = 1):
        self.workers = [Engine() for _ in range(count)]
        self.serving, self.lost = list(self.workers), []

    def replace_or_raise(self, lost):
        for place in lost:
            self.lost.append(place)
            self.workers[place] = self.serving[place] = Engine(1)


class Rewards:
    """Rewards by length; ``calls`` has how many texts came together."""

    def __init__(self):
        self.calls, self.gate = [], threading.Event()
        self.gate.set()

    def score(self, texts, rows):
        from rlworker.rewards.pool import Scores

        assert self.gate.wait(SOON_S)
        self.calls.append(len(texts))
        return Scores([float(len(row.prompt)) for row in rows], {"raised": 1}, [])


def wait_until(holds) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def streaming(cluster):
    """``streaming(rollouts, scorer)`` -> a stream, which ends with the test."""
    from contextlib import ExitStack

    from rlworker.rollouts.stream.stream import Stream

    with ExitStack() as running:
        yield lambda rollouts, scorer, tokenizer=None: running.enter_context(
            Stream(rollouts, scorer, tokenizer or make_codec().tokenizer, (5, 0, 2))
        )


def test_groups_come_in_the_order_of_their_rows_scored_as_they_become_whole(streaming):
    rollouts, rewards = Rollouts(2), Rewards()
    stream = streaming(rollouts, rewards)
    rows = make_rows("1", "12", "123", "1234", "12345")
    first, second = (stream.begin(part, SAMPLING) for part in (rows[:3], rows[3:]))
    wait_until(lambda: sum(len(engine.asked) for engine in rollouts.workers) == 5)
    asked = [request for engine in rollouts.workers for _, request in engine.asked]
    assert {len(engine.asked) for engine in rollouts.workers} == {2, 3}, "each has its part"
    assert all((one.count, one.temperature, one.max_tokens, one.goes_first) == (2, 1.0, 8, False) for one in asked)
    assert len({*rollouts.workers[0].seeds, *rollouts.workers[1].seeds}) == 2, "random numbers of their own"
    for engine in rollouts.workers[::-1]:
        engine.gate.set()
    groups, scores = stream.wait(second)
    assert [group.row.prompt for group in groups] == ["1234", "12345"]
    assert [group.rewards for group in groups] == [[4.0, 4.0], [5.0, 5.0]] and scores.values == [4.0, 4.0, 5.0, 5.0]
    groups, scores = stream.wait(first)
    assert [group.row.prompt for group in groups] == ["1", "12", "123"] and sum(rewards.calls) == 10
    assert scores.failures["raised"] >= 1 and all(len(group.completions) == 2 for group in groups)


def test_what_an_update_waits_for_goes_first_and_the_canary_to_each_engine(streaming):
    rollouts = Rollouts(2)
    stream = streaming(rollouts, Rewards())
    for engine in rollouts.workers:
        engine.gate.set()
    (row,) = make_rows("12")
    found = stream.sample_each([row] * 4, SAMPLING)
    assert len(found) == 4 and [len(engine.asked) for engine in rollouts.workers] == [2, 2]
    stream.wait(stream.begin([row], SAMPLING, goes_first=True))
    asked = [request for engine in rollouts.workers for _, request in engine.asked]
    assert all(request.goes_first for request in asked)


def test_what_a_lost_engine_was_asked_its_successor_is_asked(streaming, monkeypatch):
    """The driver replaces it where it waits, and no sooner; then the answers are those of the new one."""
    from ray.exceptions import ActorDiedError

    from rlworker.rollouts.stream import feed

    rollouts = Rollouts(2)
    stream, (first, second) = streaming(rollouts, Rewards()), rollouts.workers
    draw = stream.begin(make_rows("1", "12", "123", "1234"), SAMPLING)
    wait_until(lambda: len(first.asked) == len(second.asked) == 2)
    get, died = feed.ray.get, ActorDiedError()

    def lose(reference):
        found = get(reference)
        if found == [] and not first.gate.is_set():  # what it was asked has not been answered
            raise died
        return found

    monkeypatch.setattr(feed, "ray", SimpleNamespace(get=lose, wait=feed.ray.wait))
    second.gate.set()
    wait_until(lambda: stream._feed.list_lost().keys() == {0})
    time.sleep(0.1)
    assert rollouts.lost == [] and not draw.is_done, "nobody waits: the trainer is at an update"
    first.gate.set()
    waiting = threading.Thread(target=lambda: wait_until(lambda: rollouts.lost) or rollouts.workers[0].gate.set())
    waiting.start()
    groups, _ = stream.wait(draw)
    waiting.join()
    assert rollouts.lost == [0] and [key for key, _ in rollouts.workers[0].asked] == [key for key, _ in first.asked]
    assert sorted({group.completions[0].version for group in groups}) == [0, 1]


def test_an_error_of_an_engine_or_a_reward_is_told_to_whoever_waits(streaming):
    rollouts = Rollouts()
    stream = streaming(rollouts, Rewards())
    rollouts.workers[0].answer = lambda request: ValueError("rollout: a request cannot be sampled: too long")
    rollouts.workers[0].gate.set()
    draw = stream.begin(make_rows("1"), SAMPLING)
    with pytest.raises(ValueError, match="too long"):
        stream.wait(draw)
    with pytest.raises(ValueError, match="too long"):
        stream.begin(make_rows("1"), SAMPLING)
    rollouts, rewards = Rollouts(), Rewards()
    rewards.score = lambda texts, rows: 1 / 0
    stream = streaming(rollouts, rewards)
    rollouts.workers[0].gate.set()
    with pytest.raises(ZeroDivisionError):
        stream.wait(stream.begin(make_rows("1"), SAMPLING))


def test_a_stream_that_forgets_takes_back_what_was_asked(streaming):
    """As a run does that goes back to a checkpoint: answers that come late are nobody's."""
    rollouts, rewards = Rollouts(), Rewards()
    stream, (engine,) = streaming(rollouts, rewards), rollouts.workers
    rows = make_rows("1", "12")
    old = stream.begin(rows, SAMPLING)
    wait_until(lambda: len(engine.asked) == 2)
    stream.forget((5, 3, 2))
    wait_until(lambda: len(engine.aborted) == 2 and len(engine.seeds) == 2)
    assert engine.seeds[0] != engine.seeds[1]
    new = stream.begin(rows[1:], SAMPLING)
    engine.gate.set()
    assert [group.row.prompt for group in stream.wait(new)[0]] == ["12"] and not old.is_done
    rewards.gate.clear()
    late = stream.begin(rows, SAMPLING)
    wait_until(lambda: len(engine.asked) == 5 and not engine.open)
    stream.forget((5, 4, 2))
    rewards.gate.set()
    assert len(stream.wait(stream.begin(rows, SAMPLING))[0]) == 2 and not late.is_done


# -- episodes


class FreePool(LocalPool):
    """Processes of plays that are asked one by one. Those in ``held`` reply when they are let go."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.replies, self.held, self.restarts = {}, set(), 0
        self.references = ()

    def begin(self, slot, message):
        self.messages.append({slot: message})
        self.replies[slot] = self.stages[slot].advance(message)

    def poll(self, timeout_s):
        ready = {slot: reply for slot, reply in self.replies.items() if slot not in self.held}
        for slot in ready:
            del self.replies[slot]
        return ready

    def restart(self):
        self.restarts += 1
        self.replies.clear()
        self.stages = [self.make() for _ in self.stages]


def make_player(pool):
    from rlworker.rollouts.plays import Player

    return Player(make_codec(), pool, None, default=-1.0)


async def count_down(model, row):
    """Sample as often as the prompt says; every observation is one token longer than the one before."""
    episode = Episode(row)
    for turn in range(int(row.prompt)):
        sample = await model.sample(episode)
        episode.reward(float(turn == int(row.prompt) - 1 and sample.text != ""))
        episode.observe("1" * (turn + 1))
    return episode


def test_an_episode_waits_for_no_other(streaming):
    """One of four turns ends while another process holds its only turn back; then all are in order."""
    rollouts, pool = Rollouts(), FreePool(count_down, 2)
    stream = streaming(rollouts, make_player(pool))
    rollouts.workers[0].gate.set()
    pool.held.add(1)
    draw = stream.begin(make_rows("4", "1"), SAMPLING)
    wait_until(lambda: draw.groups[0] is not None)
    assert not draw.is_done
    pool.held.clear()
    groups, scores = stream.wait(draw)
    assert [len(group.episodes) for group in groups] == [2, 2] and scores.values == [1.0] * 4
    assert [episode.turns for group in groups for episode in group.episodes] == [4, 4, 1, 1]
    lengths = [len(piece.token_ids) for piece in groups[0].episodes[0].sequences[0]]
    said = len(make_sample("1").token_ids)
    assert lengths == [1, said, 1, said, 2, said, 3, said], "what was observed at the end is nobody's"
    prompts = [len(request.prompt.token_ids) for _, request in rollouts.workers[0].asked]
    assert sorted(prompts) == sorted([1, 1, 1, 1, *(2 + said, 4 + 2 * said, 7 + 3 * said) * 2])


def test_an_episode_whose_process_is_lost_goes_on_from_its_samples(streaming):
    """Those that were drawn meanwhile included: no token is sampled twice, and the records are the same."""
    from rlworker.episodes.record import LostWorker

    rollouts, pool = Rollouts(), FreePool(count_down)
    stream, (engine,) = streaming(rollouts, make_player(pool)), rollouts.workers
    draw = stream.begin(make_rows("3"), SAMPLING)
    wait_until(lambda: len(engine.asked) == 2)
    pool.held.add(0)
    engine.gate.set()  # the samples come, and are told to a process that does not reply
    wait_until(lambda: 0 in pool.replies and any(len(one[0].numbers) for one in pool.messages))
    pool.stages[0].close()
    pool.stages[0] = pool.make()
    pool.replies[0] = LostWorker("play worker 0", "died", -1, 0, "")
    pool.held.clear()
    groups, _ = stream.wait(draw)
    begun = [message for each in pool.messages for message in each.values() if message.jobs]
    assert [len(job.answers) for job in begun[1].jobs] == [1, 1], "begun anew, with what was sampled"
    assert len(engine.asked) == 6 and [episode.turns for episode in groups[0].episodes] == [3, 3]
    assert groups[0].rewards == [1.0, 1.0]


async def give_up(model, row):
    """End while a task of its own waits for a sample."""
    import asyncio

    episode = Episode(row)
    await model.sample(episode)
    episode.observe("11")
    asking = asyncio.create_task(model.sample(episode))
    await asyncio.sleep(0)
    episode.reward(1.0)
    asking.cancel()
    return episode


def test_a_sample_that_nobody_waits_for_any_more_is_given_up(streaming):
    rollouts, pool = Rollouts(), FreePool(give_up)
    stream, (engine,) = streaming(rollouts, make_player(pool)), rollouts.workers
    engine.gate.set()
    groups, scores = stream.wait(stream.begin(make_rows("3"), SAMPLING))
    assert scores.failures == {} and groups[0].rewards == [1.0, 1.0]
    for episode in groups[0].episodes:
        (pieces,) = episode.sequences
        assert [piece.turn for piece in pieces] == [-1, 0], "what stands before it is left out"


def test_a_stream_of_plays_that_forgets_begins_in_new_processes(streaming):
    rollouts, pool = Rollouts(), FreePool(count_down)
    stream, (engine,) = streaming(rollouts, make_player(pool)), rollouts.workers
    stream.begin(make_rows("3"), SAMPLING)
    wait_until(lambda: len(engine.asked) == 2)
    stream.forget((5, 1, 2))
    engine.gate.set()
    groups, _ = stream.wait(stream.begin(make_rows("2"), SAMPLING))
    assert pool.restarts == 1 and len(engine.aborted) == 2
    assert [episode.turns for episode in groups[0].episodes] == [2, 2]
    assert np.array_equal(groups[0].row.prompt_ids, encode("2"))
