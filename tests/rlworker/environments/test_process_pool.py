"""Environments in processes of Ray: one that holds or ends its process is named, and its neighbours go on."""

import asyncio
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import support.environments.chat
import support.environments.runners
from support.environments.runners import (
    LIMITS,
    Engines,
    load_tokenizer,
    make_codec,
    make_loop,
    make_rows,
    say_length,
    tell,
)

from engines.batch.samples import Sampling
from rlworker.base.errors import MONITOR, RunError
from rlworker.data.rows import Row
from rlworker.environments import Episode, batch_reward, one_turn
from rlworker.environments.record import LostWorker

# Longer than a process waits for its turn on a busy machine.
PATIENT = replace(LIMITS, time_limit_s=3.0)
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("by_value")]


async def chat(policy, row):
    episode = Episode(row)
    for turn in range(3):
        sample = await policy.sample(episode)
        await asyncio.sleep(0.01 * policy.random.random())
        episode.observe(f"{len(sample.token_ids)}{policy.random.randrange(100)};")
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
def roll_out(cluster, by_value):
    """``roll_out(environment, rows, options)``: trajectories, and when processes were found to be lost."""
    import ray

    for module in (support.environments.runners, support.environments.chat):
        ray.cloudpickle.register_pickle_by_value(module)
    from rlworker.environments.processes.pool import ProcessPool

    def run(environment, rows, count=1, workers=2, limits=PATIENT, say=say_length, note_lost=None, before=None, **more):
        pool = ProcessPool(environment, make_codec(), limits, workers, more.get("output"))
        with more.get("within", ExitStack()), pool:
            pool.environment, poll, lost_at = environment, pool.poll, []

            def poll_and_note():
                replies = poll()
                lost_at.extend(time.time() for reply in replies.values() if isinstance(reply, LostWorker))
                return replies

            def say_after(ids, number):
                if before and engines.asked != number:
                    engines.asked = number
                    before(pool, number)
                return say(ids, number)

            pool.poll = poll_and_note
            engines = Engines(say_after)
            engines.asked = -1
            loop = make_loop(pool, engines, -1.0)
            if note_lost:
                loop.note_lost(note_lost, 60.0)
            groups = loop.wait(loop.begin(rows, Sampling(count, 1.0, 8, (), (2,))))
            return [trajectory for group in groups for trajectory in group], lost_at

    return run


@pytest.fixture(scope="module")
def run_chat(roll_out):
    """``run_chat(how, mark, options)``: two episodes of each of six rows, of which the third misbehaves."""
    made = make_rows(*(f"{i}+{'1' * (i % 3)}=" for i in range(6)))

    def run(how="", mark=Path("/dev/null"), **options):
        rows = [replace(row, source={"how": (how if row.answer == "2" else "", mark)}) for row in made]
        return roll_out(chat, rows, 2, **options)

    return run


@pytest.fixture(scope="module")
def whole(run_chat):
    return run_chat()[0]


def tell_all(records):
    return [(tell(record), record.rewards, record.failure) for record in records]


@pytest.mark.large
def test_processes_change_nothing(run_chat, whole):
    assert all(record.failure is None and record.turns == 3 for record in whole)
    assert tell_all(run_chat(workers=1)[0]) == tell_all(run_chat(workers=3)[0]) == tell_all(whole)


@pytest.mark.large
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("sleeps", "blocked", "turn 2: held its process for 3 s, at "),
        ("is deaf", "blocked", "turn 2: it held its process, which had to be ended, at "),
        ("exits", "died", "turn 2: its process died"),
    ],
)
def test_an_environment_that_holds_or_ends_its_process_is_named_and_its_neighbours_go_on(
    run_chat, whole, how, kind, message, tmp_path
):
    records, lost_at = run_chat(how, tmp_path / "mark")
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


@pytest.mark.large
def test_a_process_that_is_killed_between_two_rounds_changes_nothing(run_chat, whole):
    def kill(pool, number):
        import ray

        if number in (1, 2):
            process = ray.get(pool.workers[number % 2].__ray_call__.remote(lambda _: os.getpid()))
            os.kill(process, signal.SIGKILL)

    heard = []
    assert tell_all(run_chat(before=kill, note_lost=heard.append)[0]) == tell_all(whole)
    assert sorted(name for lost in heard for name in lost) == ["environment worker 0", "environment worker 1"]


@pytest.mark.large
def test_a_process_that_is_stopped_changes_nothing(run_chat, whole):
    def stop(pool, number):
        import ray

        if number == 1:
            process = ray.get(pool.workers[0].__ray_call__.remote(lambda _: os.getpid()))
            os.kill(process, signal.SIGSTOP)

    heard = []
    assert tell_all(run_chat(before=stop, note_lost=heard.append)[0]) == tell_all(whole)
    assert heard == [{"environment worker 0": "got no further and was ended"}]


@pytest.mark.large
def test_an_episode_whose_process_is_killed_is_not_to_blame_where_it_ends_well_the_next_time(run_chat, whole, tmp_path):
    heard = []
    records, _ = run_chat("is killed once", tmp_path / "mark", note_lost=heard.append)
    assert len(heard) == 1 and len((tmp_path / "mark").read_text().splitlines()) == 3
    assert tell_all(records) == tell_all(whole)


# -- scorers


def say_number(ids, number):
    """Sample the number of a row, whose prompt is that and ``=``."""
    return load_tokenizer().decode(ids)[:-1]


def mark_rows(how, mark) -> list[Row]:
    rows = make_rows(*(f"{number}=" for number in range(len(how))))
    return [replace(row, source={"how": (each, mark)}) for row, each in zip(rows, how, strict=True)]


def score(text: str, row: Row) -> float:
    """The number that is the text, unless the row says otherwise."""
    how, mark = row.source["how"]
    with open(mark, "a") as file:
        file.write(f"{text[1:]}\n")
    if how == "is killed once":
        if Path(mark).read_text().split().count(text[1:]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif how == "holds the interpreter":  # C code that never gives it back
        ctypes.PyDLL(None).sleep(600)
    elif how:
        misbehave(how, Path("/dev/null"))
    return float(text[1:])


@batch_reward
def score_groups(texts: list[str], rows: list[Row]) -> list[float]:
    with open(rows[0].source["how"][1], "a") as file:
        file.write(f"{len(texts)} of {texts[0][1:]}\n")
    return [
        score(text, replace(row, source={"how": (row.source["how"][0], "/dev/null")})) for text, row in zip(texts, rows)
    ]


SHORT = replace(LIMITS, time_limit_s=1.0)


def list_outcomes(trajectories):
    return [one.failure[0] if one.failure else one.reward for one in trajectories]


def test_a_text_that_ends_its_process_fails_alone(roll_out, tmp_path):
    """Once it was tried again twice; what has been scored before is not scored again."""
    how = ["", "exits", "", "sleeps", "", ""]
    found, _ = roll_out(one_turn(score), mark_rows(how, tmp_path / "calls"), limits=SHORT, say=say_number)
    assert list_outcomes(found) == [0.0, "died", 2.0, "blocked", 4.0, 5.0] and found[1].reward == -1.0
    died = "turn 1: its process died (it exited, crashed or had no memory left), and so in 3 runs"
    assert found[1].failure[1] == died and (tmp_path / "calls").read_text().split().count("1") == 3


@pytest.mark.large
def test_a_lost_process_is_told_from_a_text_that_ends_it(roll_out, tmp_path):
    how, lost = ["", "is killed once", "exits", "is deaf", "holds the interpreter", ""], []
    options = dict(workers=1, limits=SHORT, say=say_number, note_lost=lost.append)
    found, _ = roll_out(one_turn(score), mark_rows(how, tmp_path / "calls"), **options)
    assert list_outcomes(found) == [0.0, 1.0, "died", "blocked", "blocked", 5.0]
    assert [list(each) for each in lost] == [["environment worker 0"]]
    assert lost[0]["environment worker 0"].startswith("died (killed")


@pytest.mark.large
def test_a_batch_scorer_that_ends_its_process_fails_for_its_group(roll_out, tmp_path):
    rows = mark_rows(["", "exits", ""], tmp_path / "calls")
    found, _ = roll_out(one_turn(score_groups), rows, 3, limits=SHORT, say=say_number, note_lost=lambda lost: None)
    assert list_outcomes(found) == [0.0] * 3 + ["died"] * 3 + [2.0] * 3
    assert (tmp_path / "calls").read_text().splitlines().count("3 of 1") == 3, "twice more, and then it was to blame"


@pytest.mark.large
def test_what_rays_memory_monitor_did_is_told(roll_out, tmp_path, monkeypatch):
    from rlworker.environments.processes import pool

    explain = pool.explain_death
    monkeypatch.setattr(pool, "explain_death", lambda call: explain(call) and f"{MONITOR}, holding 3 GiB")
    rows = mark_rows(["", "is killed once", "exits"], tmp_path / "calls")
    found, _ = roll_out(one_turn(score), rows, workers=1, say=say_number)
    assert list_outcomes(found) == [0.0, 1.0, "died"]
    assert found[2].failure[1] == f"turn 1: its process {MONITOR}, holding 3 GiB, and so in 3 runs"


@pytest.mark.large
def test_a_scorer_whose_module_the_processes_lack_stops_the_run(roll_out, monkeypatch):
    code = compile("def lost(text, row): return 1.0", "lost.py", "exec")
    module = type(sys)("module_of_nowhere")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "module_of_nowhere", module)
    with pytest.raises(RunError, match=r"the last one did not start .*module_of_nowhere"):
        roll_out(one_turn(module.lost), make_rows("1="), workers=1)


def speak(text: str, row: Row) -> float:
    """Says something in each way there is, and may end badly."""
    text = text[1:]
    print("printed", text)
    print("to stderr", text, file=sys.stderr)
    logging.getLogger("mine").info("informed %s", text)
    logging.getLogger("mine").debug("debugged %s", text)
    ctypes.CDLL(None).printf(b"from C %s\n", text.encode())
    subprocess.run(["sh", "-c", f"echo child {text}; echo child error {text} >&2"], check=True)
    for i in range(50):
        print(f"{text} {i} " + "x" * 100)
    if row.source["how"][0] == "own logging":
        logging.basicConfig(format="mine: %(message)s", level=logging.ERROR)
        logging.info("no info")
        logging.error("error %s", text)
    misbehave(row.source["how"][0], Path("/dev/null"))
    return 1.0


@pytest.mark.large
def test_what_a_scorer_says_is_in_its_file(roll_out, tmp_path):
    """Also of calls that are ended, and after their process was replaced; the file goes on where it was."""
    output = tmp_path / "run" / "environment.log"
    output.parent.mkdir()
    output.write_text("of the run before\n")
    how = ["", "sleeps", "exits", "", "own logging"]
    roll_out(one_turn(speak), mark_rows(how, ""), limits=SHORT, say=say_number, output=output)
    lines = output.read_text().splitlines()
    assert lines[0] == "of the run before" and "mine: error 4" in lines and "mine: no info" not in lines
    for i in range(4):
        said = [f"printed {i}", f"to stderr {i}", f"from C {i}", f"child {i}", f"child error {i}"]
        assert all(lines.count(line) >= 1 for line in said), i
        stamped = re.compile(rf"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO mine: informed {i}")
        assert any(stamped.fullmatch(line) for line in lines), i
        assert {f"{i} {j} " + "x" * 100 for j in range(50)} <= set(lines), "lines of several processes stay whole"
    assert not any("debugged" in line for line in lines)


@pytest.fixture
def on_nodes(monkeypatch):
    """``on_nodes(*is_other)``: a process on each of so many nodes. A second node stands here for itself in all but its
    address: its files are read by a process of Ray, as on any node that is not the driver's."""
    import ray

    from rlworker.environments.processes import pool, progress

    monkeypatch.setattr(progress, "_CLOSE_S", 1.0)

    def place(*is_other):
        here = ray.get_runtime_context().get_node_id()
        nodes = [progress._open_node(f"10.0.0.{place}", here, other) for place, other in enumerate(is_other)]
        monkeypatch.setattr(pool, "find_nodes", lambda count: nodes[:count])
        return nodes

    return place


@pytest.mark.large
def test_rewards_and_failures_are_the_same_on_any_nodes(roll_out, on_nodes, tmp_path):
    """Also of calls that hang, whose process is ended on its own node; what is printed goes to a file of each node."""
    how = ["", "is deaf", "", "exits", ""]
    for places in ([True], [False, True]):
        on_nodes(*places)
        options = dict(workers=len(places), limits=SHORT, say=say_number, output=tmp_path / "environment.log")
        found, _ = roll_out(one_turn(score), mark_rows(how, "/dev/null"), **options)
        assert list_outcomes(found) == [0.0, "blocked", 2.0, "died", 4.0], places
    logs = {path.name for path in tmp_path.iterdir()}
    assert logs == {"environment.log", "environment.10.0.0.0.log", "environment.10.0.0.1.log"}


@pytest.mark.large
def test_the_episodes_of_a_lost_node_run_again_on_the_others(run_chat, whole, on_nodes, capsys):
    """Its process and what reads its files end at once."""

    def lose(pool, number):
        import ray

        if number == 1:
            ray.kill(pool.workers[1])
            ray.kill(lost.files)

    _, lost = on_nodes(False, True)
    assert tell_all(run_chat(before=lose)[0]) == tell_all(whole)
    assert "WARNING environment workers of a lost node start on others" in capsys.readouterr().out
