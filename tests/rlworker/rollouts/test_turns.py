"""Lock-step rounds: what they give depends on nothing but environments and samples, whatever is lost, late or wrong."""

import asyncio
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.environments.runners import LIMITS, LocalPool, make_rows, run_episodes, tell
from support.environments.tool_functions import draw_slowly, fail

from rlworker.base.errors import RunError
from rlworker.environments import Episode
from rlworker.environments.record import LostWorker

HERE = __file__


@pytest.fixture(scope="module")
def rows():
    return make_rows(*(f"{i}+{'1' * (i % 3)}=" for i in range(6)))


async def chat(policy, row):
    """One to three turns, with a wait of random duration, a tool and a random number of the episode's own."""
    episode = Episode(row)
    for _ in range(1 + int(row.answer) % 3):
        sample = await policy.sample(episode)
        await asyncio.sleep(random.random() * 0.01)
        drawn = await policy.tool(draw_slowly, 1000)
        episode.observe(f"{drawn};{policy.random.randrange(100)};")
        episode.reward(len(sample.token_ids) + drawn)
    return episode


def tell_all(records):
    return [(tell(record), record.rewards, record.failure, record.tool_calls) for record in records]


def test_episodes_do_not_depend_on_processes_or_durations(rows):
    limits = LIMITS.__class__(8, 80, 8, 5.0, 5.0)
    one, three = (run_episodes(LocalPool(chat, workers, limits), rows, 2) for workers in (1, 3))
    assert tell_all(one) == tell_all(three)
    assert [record.turns for record in one[::2]] == [1, 2, 3, 1, 2, 3] and all(r.failure is None for r in one)
    twins = [tell(record)[0][2] for record in one[4:6]]
    assert twins[0] != twins[1], "each episode has random numbers of its own"


@pytest.mark.parametrize("lose", [{0: -1}, {1: -1}, {2: -1}, {0: -1, 2: -1, 4: -1}])
def test_episodes_that_run_again_are_the_same(rows, lose):
    limits, heard = LIMITS.__class__(8, 80, 8, 5.0, 5.0), []
    whole = run_episodes(LocalPool(chat, 2, limits), rows)
    lost = run_episodes(LocalPool(chat, 2, limits, lose), rows, note_lost=heard.append)
    assert tell_all(whole) == tell_all(lost)
    assert heard == [{"environment worker 0": "died"}] * len(lose)


@pytest.mark.parametrize(("differs", "texts"), [(False, "012"), (True, "023")])
def test_an_episode_that_runs_again_has_the_same_samples_until_it_writes_otherwise(rows, differs, texts):
    """Its process is lost as it asks for the third sample. The text of a sample is the number of samples before it."""
    runs, drawn = [], []

    async def write(policy, row):
        runs.append(row)
        episode = Episode(row)
        for _ in range(3):
            await policy.sample(episode)
            episode.observe(str(len(runs)) if differs else "1")
        return episode

    def say(ids, number):
        drawn.append(ids)
        return str(len(drawn) - 1)

    (record,) = run_episodes(LocalPool(write, lose={2: -1}), rows[:1], say=say)
    assert record.failure is None and len(runs) == 2 and len(drawn) == (4 if differs else 3)
    written = [text for _, text in tell(record)[0][1:]]
    assert written == [f"~{texts[0]}<eos>", written[1], f"~{texts[1]}<eos>", written[1], f"~{texts[2]}<eos>"]
    assert written[1] == ("2" if differs else "1"), "of the run that came to its end"
    assert [tuple(ids) for ids in drawn[-2:]] == [prompt_of(record, 1), prompt_of(record, 2)]


def prompt_of(record, turn):
    """The ids that stand before the sample of a turn, in an episode of one sequence."""
    (segments,) = record.sequences
    before = segments[: [segment.turn for segment in segments].index(turn)]
    return tuple(int(token) for segment in before for token in segment.token_ids)


async def chat_once(policy, row):
    row.source["runs"].append(row.answer)
    return await chat(policy, row)


chat_once.runs_once = True


DIED = "its process died (it exited, crashed or had no memory left)"


def test_an_episode_that_may_run_only_once_fails_with_its_process_at_once():
    """With all others that the process had begun; those of another process go on."""
    begun, heard = [], []
    rows = [replace(row, source={"runs": begun}) for row in make_rows("0+", "1+", "2+", "4+", "5+")]
    pool = LocalPool(chat_once, 2, lose={2: -1})
    records = run_episodes(pool, rows, default=-1.0, note_lost=heard.append)
    assert sorted(begun) == ["0", "1", "2", "4", "5"], "none ran twice"
    failures = [record.failure for record in records]
    assert failures[0] is None, "it had ended before"
    assert failures[1:3] == [("died", f"turn 2: {DIED}, and this environment runs once")] * 2
    assert failures[3:] == [None, None]
    assert [record.reward for record in records[1:3]] == [-1.0, -1.0] and heard == [{"environment worker 0": "died"}]


def test_an_episode_that_no_process_has_begun_runs_though_it_may_only_once(rows):
    begun = []
    rows = [replace(row, source={"runs": begun}) for row in rows[:2]]
    pool, messages = LocalPool(chat_once), []
    begin = pool.begin

    def begin_later(slot, *message):
        messages.append(message)
        if len(messages) > 1:
            return begin(slot, *message)
        pool.replies[slot] = LostWorker("environment worker 0", "died", -1, has_begun=False)

    pool.begin = begin_later
    assert [record.failure for record in run_episodes(pool, rows)] == [None, None] and len(begun) == 2


def test_an_episode_has_failed_once_it_was_run_again_twice(rows):
    """The other episode of its process is run again as often, and ends well."""
    heard, lose = [], {0: 0, 1: 0, 2: 0}
    first, second = run_episodes(LocalPool(chat, lose=lose), rows[:2], default=-1.0, note_lost=heard.append)
    assert first.failure == ("died", f"turn 0: {DIED}, and so in 3 runs") and first.reward == -1.0
    assert second.failure is None and heard == [], "the process was not to blame"

    first, second = run_episodes(LocalPool(chat, lose={0: 0, 1: 0}), rows[:2], note_lost=heard.append)
    assert first.failure is None and heard == [{"environment worker 0": "died"}] * 2, "the episode was not to blame"


def test_what_rays_memory_monitor_did_is_told(rows):
    pool = LocalPool(chat, lose={0: 0, 1: 0, 2: 0})
    pool.fate = "was ended by Ray's memory monitor, holding 3 GiB"
    first, second = run_episodes(pool, rows[:2])
    assert first.failure == ("died", f"turn 0: its process {pool.fate}, and so in 3 runs") and second.failure is None


@pytest.mark.parametrize("rounds", [range(9), (2, 4, 6)], ids=["at once", "before anything new is asked for"])
def test_processes_that_are_lost_time_and_again_end_the_run(rows, rounds):
    with pytest.raises(RunError, match="environment worker 0 died, 3 times in a row, while no episode ran"):
        run_episodes(LocalPool(chat, lose=dict.fromkeys(rounds, -1)), rows[2:3])


async def misbehave(policy, row):
    episode = Episode(row)
    how = row.source["how"]
    if how == "never samples":
        return episode
    await policy.sample(episode)
    episode.reward(5)
    if how == "raises":
        raise KeyError("level")
    if how == "exits":
        sys.exit(3)
    if how == "awaits for ever":
        await asyncio.sleep(600)
    if how == "is deaf to its end":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)
    while how == "samples past the limit":
        await policy.sample(episode)
    if how == "returns text":
        return "episode"
    if how == "returns another":
        return Episode(row)
    if how == "plays two":
        await policy.sample(Episode(row))
    if how == "samples at once":
        await asyncio.gather(policy.sample(episode), policy.sample(episode))
    if how == "gives a sample up":
        asyncio.get_running_loop().call_later(0, (task := asyncio.create_task(policy.sample(episode))).cancel)
        await asyncio.gather(task, return_exceptions=True)
        await policy.sample(episode)
    if how == "exits in a task":
        await asyncio.create_task(leave())
    if how == "tool":
        await policy.tool(fail)
    return episode


async def leave():
    sys.exit(1)


FAULTS = {
    "never samples": ("no_generation", "turn 0: returned before it sampled", "async def misbehave"),
    "raises": ("raised", "turn 1: KeyError: 'level'", 'raise KeyError("level")'),
    "exits": ("raised", "turn 1: SystemExit: 3", "sys.exit(3)"),
    "awaits for ever": ("timeout", "turn 1: no end after 0.5 s of its own", "await asyncio.sleep(600)"),
    "is deaf to its end": ("timeout", "turn 1: no end after 0.5 s of its own", "    await asyncio.sleep(600)"),
    "samples past the limit": ("limit", "turn 4: EpisodeLimit: turn 5 of at most 4", "await policy.sample(episode)"),
    "returns text": ("no_episode", "turn 1: returned 'episode', expected its Episode", "async def misbehave"),
    "returns another": ("no_episode", "turn 1: returned another Episode", "async def misbehave"),
    "plays two": (
        "raised",
        "turn 1: RuntimeError: sample: this policy has sampled for another",
        "sample(Episode(row))",
    ),
    "samples at once": ("raised", "turn 1: RuntimeError: sample: an earlier call of policy.sample", "asyncio.gather"),
    "gives a sample up": (
        "raised",
        "turn 1: RuntimeError: sample: the environment cancelled an earlier call of policy.sample",
        "await policy.sample(episode)",
    ),
    "exits in a task": (
        "raised",
        "turn 1: RuntimeError: SystemExit in a task of the environment",
        "create_task(leave())",
    ),
    "tool": ("raised", "turn 1: ToolFailure: raised: fail", "await policy.tool(fail)"),
}


@pytest.fixture(scope="module")
def failed():
    """The trajectories of environments that misbehave, among some that do not; and how long that took."""
    rows = make_rows(*(str(i % 10) for i in range(2 * len(FAULTS))))
    for row, how in zip(rows, (how for fault in FAULTS for how in (fault, "well"))):
        row.source["how"] = how
    start = time.monotonic()
    return run_episodes(LocalPool(misbehave), rows, default=-1.0), time.monotonic() - start


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_its_own_episodes_and_is_named_with_turn_and_line(failed, fault):
    record = next(record for record in failed[0] if record.row.source["how"] == fault)
    kind, message, line = FAULTS[fault]
    assert record.failure and record.failure[0] == kind and record.failure[1].startswith(message), record.failure
    named = [int(part.split()[0].rstrip(",")) for part in record.failure[1].split(f"{HERE}:")[1:]]
    lines = open(HERE).read().splitlines()
    assert any(line in lines[number - 1] for number in named), (record.failure, line)
    assert record.reward == (0.0 if fault == "never samples" else -1.0)


def test_the_neighbours_of_faults_go_on(failed):
    records, seconds = failed
    others = [record for record in records if record.row.source["how"] == "well"]
    assert all(record.failure is None and record.reward == 5.0 for record in others)
    assert seconds < LIMITS.time_limit_s + 5


def test_the_time_of_an_episode_leaves_out_samples_tools_and_neighbours(rows):
    """A limit of a second: each of four works for 0.3, and waits for a tool and for a rollout that take 1.1."""

    async def work(policy, row):
        episode = Episode(row)
        await policy.sample(episode)
        await asyncio.sleep(0.01)  # by whose end the neighbours hold the process
        time.sleep(0.3)
        await policy.tool(time.sleep, 1.1)
        await asyncio.sleep(0.2)  # long enough to be looked at
        return episode

    def say(ids, number):
        time.sleep(1.1 / 4)  # of each prompt
        return "1"

    limits = replace(LIMITS, time_limit_s=1.0)
    records = run_episodes(LocalPool(work, limits=limits), rows[:4], say=say)
    assert [record.failure for record in records] == [None] * 4


def test_a_task_that_episodes_share_outlives_the_time_of_the_first(tmp_path):
    """It is begun in an episode whose limit passes while it goes on, in steps that are short."""
    shared: list[asyncio.Task] = []

    async def count():
        for _ in range(60):
            time.sleep(0.02)
            await asyncio.sleep(0)
        return "counted"

    async def lean(policy, row):
        episode = Episode(row)
        shared or shared.append(asyncio.create_task(count()))
        await policy.sample(episode)
        if row.answer == "1":
            assert await shared[0] == "counted"
        return episode

    records = run_episodes(LocalPool(lean, block_file=str(tmp_path / "block")), make_rows("0", "1"))
    assert [record.failure for record in records] == [None, None] and shared[0].done()


async def block(policy, row):
    episode = Episode(row)
    await policy.sample(episode)
    if row.answer == "1":
        wait_for_ever()
    if row.answer == "2":
        await asyncio.create_task(block_in_a_task())
    return episode


def wait_for_ever():
    time.sleep(600)


async def block_in_a_task():
    sum(zero for zero in iter(int, 1))  # without end


def test_an_environment_that_holds_its_process_is_interrupted_and_its_line_named(rows, tmp_path):
    """A neighbour that waits for its turn meanwhile is none the worse."""
    start, block_file = time.monotonic(), str(tmp_path / "block")
    records = run_episodes(LocalPool(block, block_file=block_file), rows[:4])
    assert time.monotonic() - start < 2 * LIMITS.time_limit_s + 5
    assert [record.failure and record.failure[0] for record in records] == [None, "blocked", "blocked", None]
    lines = open(HERE).read().splitlines()
    for record, inner in ((records[1], "time.sleep(600)"), (records[2], "sum(zero for zero")):
        start, message, places = record.failure[1].partition(f"held its process for {LIMITS.time_limit_s:g} s, at ")
        assert start == "turn 1: " and message
        assert inner in lines[int(places.split(":")[-1]) - 1], record.failure
    number, where = json.loads(Path(block_file).read_text())
    assert number == 2 and HERE in where, "for whoever would have had to end the process"
