"""Plays in processes of Ray: one that holds or ends its process is named, and its neighbours play on."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.episodes.stages import LIMITS, make_codec, make_rows, make_sample, say_length, tell

from engines.batch.samples import Completions
from rlworker.episodes import Episode

# Longer than a process waits for its turn on a busy machine.
PATIENT = replace(LIMITS, time_limit_s=3.0)
pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]


async def chat(model, row):
    episode = Episode(row)
    for turn in range(3):
        sample = await model.sample(episode)
        await asyncio.sleep(0.01 * model.random.random())
        episode.observe(f"{len(sample.token_ids)}{model.random.randrange(100)};")
        if turn == 1:
            misbehave(*row.source["how"])
    episode.reward(1)
    return episode


def misbehave(how: str, mark: Path) -> None:
    """Do so, after a line with the time in a file."""
    if how:
        with mark.open("a") as file:
            file.write(f"{time.time()}\n")
    if how == "sleeps":
        time.sleep(600)
    if how == "is deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        time.sleep(600)
    if how == "exits":
        os._exit(3)
    if how == "is killed once" and len(mark.read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def play(cluster, by_value):
    """``play(how, mark, options of Rounds)``: records of six rows, two episodes each, where the third row misbehaves;
    and when processes were found to be lost."""
    import ray
    import support.episodes.chat
    import support.episodes.stages

    for module in (support.episodes.stages, support.episodes.chat):
        ray.cloudpickle.register_pickle_by_value(module)
    from rlworker.episodes.processes.pool import PlayPool
    from rlworker.episodes.record import LostWorker
    from rlworker.episodes.rounds import Rounds

    def ask(asked, number):
        return Completions.join([make_sample(say_length(one.prompt.token_ids, number)) for one in asked]), {}

    made = make_rows(*(f"{i}+{'1' * (i % 3)}=" for i in range(6)))

    def play_all(how="", mark=Path("/dev/null"), workers=2, before=lambda pool, number: None, **options):
        rows = [replace(row, source={"how": (how if row.answer == "2" else "", mark)}) for row in made]
        with PlayPool(chat, make_codec(), PATIENT, workers) as pool:
            advance, lost_at = pool.advance, []

            def advance_and_note(messages):
                replies = advance(messages)
                lost_at.extend(time.time() for reply in replies.values() if isinstance(reply, LostWorker))
                return replies

            def ask_after(asked, number):
                before(pool, number)
                return ask(asked, number)

            pool.advance = advance_and_note
            return Rounds(pool, rows, 2, ask_after, default=-1.0, **options).play(), lost_at

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
        ("sleeps", "blocked", "turn 2: held its process for 3 s, at "),
        ("is deaf", "blocked", "turn 2: it held its process, which had to be ended, at "),
        ("exits", "died", "turn 2: its process died"),
    ],
)
def test_a_play_that_holds_or_ends_its_process_is_named_and_its_neighbours_play_on(
    play, whole, how, kind, message, tmp_path
):
    records, lost_at = play(how, tmp_path / "mark")
    for record, other in zip(records, whole, strict=True):
        if record.row.answer != "2":
            assert tell_all([record]) == tell_all([other])
            continue
        assert record.failure and record.failure[0] == kind and record.failure[1].startswith(message), record.failure
        assert record.reward == -1.0 and tell(record)[0] == tell(other)[0][:4]
        if kind == "blocked":
            line = int(record.failure[1].split(":")[-1])
            assert "time.sleep(600)" in open(__file__).read().splitlines()[line - 1]
    if how != "sleeps":  # which heeds the interrupt
        begun_at = [float(line) for line in (tmp_path / "mark").read_text().splitlines()]
        assert all(lost - begun < PATIENT.time_limit_s + 5 for begun, lost in zip(begun_at, lost_at, strict=True))


def test_a_process_that_is_killed_between_two_rounds_changes_nothing(play, whole):
    def kill(pool, number):
        import ray

        if number in (1, 2):
            process = ray.get(pool.workers[number % 2].__ray_call__.remote(lambda _: os.getpid()))
            os.kill(process, signal.SIGKILL)

    heard = []
    assert tell_all(play(before=kill, note_lost=heard.append)[0]) == tell_all(whole)
    assert sorted(name for lost in heard for name in lost) == ["play worker 0", "play worker 1"]


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
    records, _ = play("is killed once", tmp_path / "mark", note_lost=heard.append)
    assert len(heard) == 1 and len((tmp_path / "mark").read_text().splitlines()) == 3
    assert tell_all(records) == tell_all(whole)
