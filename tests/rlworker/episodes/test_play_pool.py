"""Plays in processes of Ray: one that holds or ends its process is named, and its neighbours play on."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from support.episodes.stages import LIMITS, make_codec, make_rows, make_sample, say_length, tell

from engines.batch.samples import Completions
from rlworker.episodes import Episode

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]


async def chat(model, row):
    episode = Episode(row)
    for turn in range(3):
        sample = await model.sample(episode)
        await asyncio.sleep(0.01 * model.random.random())
        episode.observe(f"{len(sample.token_ids)}{model.random.randrange(100)};")
        if turn == 1:
            misbehave(row.source.get("how", ""))
    episode.reward(1)
    return episode


def misbehave(how: str) -> None:
    if how == "sleeps":
        time.sleep(600)
    if how == "is deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        time.sleep(600)
    if how == "exits":
        os._exit(3)
    if how.startswith("is killed once") and not (mark := Path(how.split()[-1])).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def play(cluster, by_value):
    """``play(how, options of Rounds)``: records of six rows, two episodes each, where the third row misbehaves."""
    import ray
    import support.episodes.chat
    import support.episodes.stages

    for module in (support.episodes.stages, support.episodes.chat):
        ray.cloudpickle.register_pickle_by_value(module)
    from rlworker.episodes.pool import PlayPool
    from rlworker.episodes.rounds import Rounds

    def ask(asked, number):
        return Completions.join([make_sample(say_length(one.prompt.token_ids, number)) for one in asked]), {}

    made = make_rows(*(f"{i}+{'1' * (i % 3)}=" for i in range(6)))

    def play_all(how="", workers=2, before=lambda pool, number: None, **options):
        rows = [
            type(row)(row.prompt, row.prompt_ids, row.answer, {"how": how if row.answer == "2" else ""}) for row in made
        ]
        with PlayPool(chat, make_codec(), LIMITS, workers) as pool:

            def ask_after(asked, number):
                before(pool, number)
                return ask(asked, number)

            start = time.monotonic()
            records = Rounds(pool, rows, 2, ask_after, default=-1.0, **options).play()
            return records, time.monotonic() - start

    return play_all


@pytest.fixture(scope="module")
def whole(play):
    return play()[0]


def tell_all(records):
    return [(tell(record), record.rewards, record.failure) for record in records]


def test_processes_change_nothing(play, whole):
    assert all(record.failure is None and record.turns == 3 for record in whole)
    assert tell_all(play(workers=1)[0]) == tell_all(play(workers=3)[0]) == tell_all(whole)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("sleeps", "blocked", "turn 2: held its process for 0.5 s, at "),
        ("is deaf", "blocked", "turn 2: it held its process, which had to be ended, at "),
        ("exits", "died", "turn 2: its process died"),
    ],
)
def test_a_play_that_holds_or_ends_its_process_is_named_and_its_neighbours_play_on(play, whole, how, kind, message):
    records, seconds = play(how)
    for record, other in zip(records, whole, strict=True):
        if record.row.answer != "2":
            assert tell_all([record]) == tell_all([other])
            continue
        assert record.failure and record.failure[0] == kind and record.failure[1].startswith(message), record.failure
        assert record.reward == -1.0 and tell(record)[0] == tell(other)[0][:4]
        if kind == "blocked":
            line = int(record.failure[1].split(":")[-1])
            assert "time.sleep(600)" in open(__file__).read().splitlines()[line - 1]
    # Two episodes, one after the other, each of which may take a process with it that takes seconds to start.
    assert seconds < 2 * (LIMITS.time_limit_s + 5) + 10


def test_a_process_that_is_killed_between_two_rounds_changes_nothing(play, whole):
    def kill(pool, number):
        import ray

        if number in (1, 2):
            process = ray.get(pool.workers[number % 2].__ray_call__.remote(lambda _: os.getpid()))
            os.kill(process, signal.SIGKILL)

    heard = []
    assert tell_all(play(before=kill, note_lost=heard.append)[0]) == tell_all(whole)
    assert heard == [{"play worker 1": "died"}, {"play worker 0": "died"}]


def test_a_process_that_is_stopped_changes_nothing(play, whole):
    def stop(pool, number):
        import ray

        if number == 1:
            process = ray.get(pool.workers[0].__ray_call__.remote(lambda _: os.getpid()))
            os.kill(process, signal.SIGSTOP)

    heard = []
    assert tell_all(play(before=stop, note_lost=heard.append)[0]) == tell_all(whole)
    assert heard == [{"play worker 0": "got no further and was ended"}]


def test_a_play_whose_process_is_killed_is_not_to_blame_where_it_ends_well_the_next_time(play, whole, tmp_path):
    heard = []
    records, _ = play(f"is killed once {tmp_path / 'once'}", note_lost=heard.append)
    assert len(heard) == 1 and (tmp_path / "once").exists()
    assert tell_all(records) == tell_all(whole)
