"""Rewards that hang, raise, return no number or end their process: each is its own text's outcome and no other's."""

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlworker.config.sections import RewardConfig
from rlworker.data.rows import Row
from rlworker.rewards.functions import batch_reward, exact_match

LIMIT_S = 0.5
DEFAULT = -1.0

HANGS = {"loop": "timeout", "caught loop": "timeout", "sleep": "timeout"}
DEAF = {"bare except": "timeout", "masked signal": "timeout", "held interpreter": "timeout"}
ERRORS = {"raise": "raised", "exit": "raised", "recursion": "raised"}
NO_NUMBERS = dict.fromkeys(("nan", "inf", "no decimal", "none", "text", "dict", "object"), "not_a_number")
LARGE = dict.fromkeys(("beyond float32", "beyond a million"), "too_large")
COUNTS = {"pair": "wrong_count", "empty": "wrong_count"}
DEATHS = {"os._exit": "died", "segfault": "died"}
FAILURES = HANGS | DEAF | ERRORS | NO_NUMBERS | LARGE | COUNTS | DEATHS
NUMBERS = ("int", "bool", "numpy", "array", "no axis", "decimal", "generator", "a million")


def hang(how: str) -> float:
    if how == "sleep":
        time.sleep(600)
    if how == "masked signal":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        time.sleep(600)
    if how == "held interpreter":  # C code that never gives the interpreter back
        ctypes.PyDLL(None).sleep(600)
    while True:
        try:
            while True:
                pass
        except BaseException as error:
            if how == "loop" or (how == "caught loop" and not isinstance(error, Exception)):
                raise


def recurse() -> float:
    return recurse()


def misbehave(text: str, row: Row) -> float:
    """The number that is the text, except where the row says otherwise; each call leaves a line in the row's file."""
    print("a reward may print")
    how = row.source.get("how")
    with open(row.source["calls"], "a") as calls:
        calls.write(text + "\n")
    if how in HANGS | DEAF:
        return hang(how)
    if how == "raise":
        raise KeyError("level")
    if how == "exit":
        sys.exit(3)
    if how == "recursion":
        return recurse()
    if how == "os._exit":
        os._exit(0)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    number = float(text)
    results = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "no decimal": Decimal("sNaN")}
    results |= {"beyond float32": 1e39, "beyond a million": -1e6 - 1, "a million": 1e6 if number else 0.0}
    results |= {"dict": {"reward": 1.0}, "object": object(), "pair": [number, number], "empty": ()}
    results |= {"int": int(number), "bool": True, "numpy": np.float32(number), "array": np.array([number])}
    results |= {"no axis": np.array(number), "decimal": Decimal(text), "generator": (x for x in [number])}
    return results.get(how, number)


@batch_reward
def misbehave_in_groups(texts: list[str], rows: list[Row]) -> list[float]:
    how = rows[0].source.get("how")
    with open(rows[0].source["calls"], "a") as calls:
        calls.write(" ".join(texts) + "\n")
    assert all(row is rows[0] for row in rows)
    if how in FAILURES:
        misbehave(texts[0], make_row(how))
    values = np.array([float(text) for text in texts])
    if how == "one nan":
        values[1] = float("nan")
    return values[1:] if how == "too few" else values


def slow(text: str, row: Row) -> float:
    """Hangs and is deaf for longer than a pool waits, and returns all the same."""
    with open(row.source["calls"], "a") as calls:
        calls.write(text + "\n")
    if row.source["how"] == "masked signal":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        time.sleep(LIMIT_S + 2)
    time.sleep(0.2)
    return float(text)


def speak(text: str, row: Row) -> float:
    """Says something in each way there is, and may end badly."""
    print("printed", text)
    print("to stderr", text, file=sys.stderr)
    logging.getLogger("mine").info("informed %s", text)
    logging.getLogger("mine").debug("debugged %s", text)
    ctypes.CDLL(None).printf(b"from C %s\n", text.encode())
    subprocess.run(["sh", "-c", f"echo child {text}; echo child error {text} >&2"], check=True)
    if row.source["how"] == "own logging":
        logging.basicConfig(format="mine: %(message)s", level=logging.ERROR)
        logging.info("no info")
        logging.error("error %s", text)
    if row.source["how"] in HANGS:
        return hang(row.source["how"])
    if row.source["how"] == "os._exit":
        os._exit(0)
    return 1.0


def speak_much(text: str, row: Row) -> float:
    for i in range(200):
        print(f"{text} {i} " + "x" * 100)
    return 1.0


def process_id(text: str, row: Row) -> float:
    time.sleep(0.01)
    return os.getpid()


def die_at_first(text: str, row: Row) -> float:
    """Is killed in the first call of a row that says so, and in every call of one that ends its process."""
    before = Path(row.source["calls"]).read_text().split()
    misbehave(text, row)
    if row.source["how"] == "killed" and text not in before:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(text)


def make_row(how: str | None, calls="/dev/null") -> Row:
    return Row(f"prompt {how}", (1, 2), "answer", {"how": how, "calls": str(calls)})


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def make_pool(cluster, by_value, monkeypatch):
    """``make(reward, workers)`` -> a pool that ends with the test and has less patience than others."""

    from rlworker.rewards import pool as reward_pool

    pools = []
    monkeypatch.setattr(reward_pool, "GRACE_S", 1.0)
    monkeypatch.setattr(reward_pool, "STARTS", 2)

    def make(reward, workers=1, output=None) -> reward_pool.RewardPool:
        pools.append(reward_pool.RewardPool(reward, RewardConfig(workers, LIMIT_S, DEFAULT), output))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.large), 2])
def test_each_failure_is_its_own_texts_outcome(make_pool, tmp_path, workers):
    """Failures between good texts, one after another, first and last."""
    pool, calls = make_pool(misbehave, workers), tmp_path / "calls"
    how = [kind for failure in FAILURES if failure not in DEATHS for kind in (failure, None)]
    how += ["os._exit", "segfault", *NUMBERS, None, "raise", "raise", None, "raise", "os._exit"]
    rows, texts = [make_row(kind, calls) for kind in how], [str(i) for i in range(len(how))]
    began = time.monotonic()
    scores = pool.score(texts, rows)
    seconds = time.monotonic() - began
    others = dict.fromkeys(FAILURES, DEFAULT) | {"bool": 1.0, "a million": 1e6}
    want = [others.get(kind, float(i)) for i, kind in enumerate(how)]
    assert scores.values == want and all(type(value) is float for value in scores.values)
    assert scores.failures == Counter(FAILURES[kind] for kind in how if kind in FAILURES)
    assert scores.failures == {
        "timeout": 6,
        "raised": 6,
        "not_a_number": 7,
        "too_large": 2,
        "wrong_count": 2,
        "died": 3,
    }
    assert Counter(calls.read_text().split()) == Counter(texts), "each is called for once"
    assert seconds < 60, f"{len(HANGS) + len(DEAF)} hangs of {LIMIT_S} s each took {seconds:.0f} s"
    again = pool.score(["7", "8"], [make_row(None)] * 2)
    assert again.values == [7.0, 8.0] and again.failures == {} and again.examples == []


def test_examples_say_what_happened_and_are_few(make_pool):
    from rlworker.rewards.pool import EXAMPLES

    pool = make_pool(misbehave)
    rows = [
        make_row(kind) for kind in ("raise", None, "raise", "none", "raise", "raise", "sleep", "pair", "caught loop")
    ]
    scores = pool.score([f"{i}" for i in range(9)], rows)
    assert EXAMPLES == 3
    assert [(e.kind, e.text) for e in scores.examples] == [
        ("raised", "0"),
        ("raised", "2"),
        ("not_a_number", "3"),
        ("raised", "4"),
        ("timeout", "6"),
        ("wrong_count", "7"),
        ("timeout", "8"),
    ]
    assert scores.examples.pop().message.startswith("no end after 0.5 s, at "), "``except Exception`` lets it through"
    said = {e.kind: e.message for e in scores.examples}
    assert said["raised"].startswith("KeyError: 'level', at ") and "test_reward_pool.py:" in said["raised"]
    place = r"no end after 0\.5 s, at \S*test_reward_pool\.py:(\d+) > \S*test_reward_pool\.py:(\d+)"
    lines = [
        Path(__file__).read_text().splitlines()[int(n) - 1].strip()
        for n in re.fullmatch(place, said["timeout"]).groups()
    ]
    assert lines == ["return hang(how)", "time.sleep(600)"], "in the reward function, and where it hung"
    assert said["not_a_number"] == "returned None"
    assert said["wrong_count"] == "returned 2 numbers for 1 texts: [7.0, 7.0]"
    kinds = {"reward_raised": 4, "reward_not_a_number": 1, "reward_timeout": 2, "reward_wrong_count": 1}
    assert scores.count_failures("reward") == {"reward_failures": 8} | kinds
    assert scores.summarise().startswith(
        "8 of 9 rewards failed: 4 raised, 1 not_a_number, 2 timeout, 1 wrong_count; "
        "raised on prompt 'prompt raise', text '0': KeyError: 'level', at "
    )


def test_a_batch_reward_fails_for_its_group_alone(make_pool, tmp_path):
    pool, calls = make_pool(misbehave_in_groups, workers=2), tmp_path / "calls"
    how = [None, "one nan", "too few", "os._exit", None, "raise", "sleep", "masked signal", None]
    rows = [row for kind in how for row in [make_row(kind, calls)] * 3]
    scores = pool.score([str(i) for i in range(27)], rows)
    fine = {*range(3), 3, 5, *range(12, 15), *range(24, 27)}
    assert scores.values == [float(i) if i in fine else DEFAULT for i in range(27)]
    assert scores.failures == {"not_a_number": 1, "wrong_count": 3, "died": 3, "raised": 3, "timeout": 6}
    groups = [f"{i} {i + 1} {i + 2}" for i in range(0, 27, 3)]
    assert Counter(calls.read_text().splitlines()) == Counter(groups), "each is called for once, and whole"


def test_a_text_that_is_met_when_another_hung_is_not_to_blame(make_pool, monkeypatch, tmp_path):
    """The call that seemed to hang ends just before its process does, which is then at the next text."""
    from rlworker.rewards import pool as reward_pool

    pool, calls, end = make_pool(slow), tmp_path / "calls", reward_pool.end_worker

    def end_late(part):
        while part.node.ask("count_scored", [part.number]) == [part.progress]:
            time.sleep(0.01)
        time.sleep(0.1)
        end(part)

    monkeypatch.setattr(reward_pool, "end_worker", end_late)
    scores = pool.score(["1", "2", "3"], [make_row(how, calls) for how in ("masked signal", None, None)])
    assert scores.values == [1.0, 2.0, 3.0] and scores.failures == {}
    assert calls.read_text().split() == ["1", "2", "2", "3"]


def test_the_processes_take_part_and_end_with_the_pool(make_pool):
    pool = make_pool(process_id, workers=2)
    pids = set(pool.score(["a"] * 100, [make_row(None)] * 100).values)
    assert len(pids) == 2 and os.getpid() not in pids
    pool.stop()
    assert all(is_gone(int(pid)) for pid in pids)


def test_a_process_that_died_between_two_calls_is_replaced(make_pool):
    pool = make_pool(process_id)
    seen = set()
    for _ in range(3):  # more often than a pool tries to start a worker that does not come up
        (pid,) = pool.score(["a"], [make_row(None)]).values
        seen.add(pid)
        os.kill(int(pid), signal.SIGKILL)
        assert is_gone(int(pid))
    assert len(seen) == 3
    assert pool.score([], []).values == []


def test_a_reward_whose_module_the_workers_lack_stops_the_run(make_pool):
    code = compile("def lost(text, row): return 1.0", "lost.py", "exec")
    module = type(sys)("module_of_nowhere")
    exec(code, module.__dict__)
    sys.modules["module_of_nowhere"] = module
    with pytest.raises(RuntimeError, match=r"its process does not start(.|\n)*module_of_nowhere"):
        make_pool(module.lost).score(["a"], [make_row(None)])


def test_a_reward_that_cannot_be_sent_is_refused(make_pool):
    lock = threading.Lock()

    def guarded(text, row):
        with lock:
            return 1.0

    with pytest.raises(ValueError, match=r"guarded' cannot be sent to another process .*cannot pickle '_thread.lock'"):
        make_pool(guarded)


def test_what_a_reward_says_is_in_its_file(make_pool, tmp_path):
    """Also of calls that are ended, and after their process was replaced; the file goes on where it was."""
    output = tmp_path / "run" / "rewards.log"
    output.parent.mkdir()
    output.write_text("of the run before\n")
    how = [None, "sleep", "os._exit", "loop"]
    make_pool(speak, output=output).score([str(i) for i in range(4)], [make_row(kind) for kind in how])
    lines = output.read_text().splitlines()
    assert lines[0] == "of the run before"
    for i in range(4):
        said = [f"printed {i}", f"to stderr {i}", f"from C {i}", f"child {i}", f"child error {i}"]
        assert [lines.count(line) for line in said] == [1] * 5, i
        stamped = re.compile(rf"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO mine: informed {i}")
        assert len([line for line in lines if stamped.fullmatch(line)]) == 1, i
    assert not any("debugged" in line for line in lines)


def test_a_rewards_own_logging_takes_the_place_of_ours(make_pool, tmp_path):
    output = tmp_path / "rewards.log"
    make_pool(speak, output=output).score(["0", "1"], [make_row("own logging"), make_row(None)])
    lines = output.read_text().splitlines()
    assert "mine: error 0" in lines and "printed 1" in lines
    assert not any("informed 1" in line or "no info" in line for line in lines)


def test_lines_of_several_processes_stay_whole(make_pool, tmp_path):
    output = tmp_path / "rewards.log"
    make_pool(speak_much, workers=2, output=output).score([str(i) for i in range(16)], [make_row(None)] * 16)
    lines = output.read_text().splitlines()
    said = {f"{text} {i} " + "x" * 100 for text in range(16) for i in range(200)}
    assert set(lines) >= said and len([line for line in lines if "x" * 100 in line]) == 3200


def test_exact_match_ignores_blanks_around(make_pool):
    row = make_row(None)
    assert make_pool(exact_match).score([" answer\n", "Answer", "answer"], [row] * 3).values == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("settings", [dict(workers=0), dict(time_limit_s=0.0), dict(default=float("nan"))])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        RewardConfig(**settings)


def test_a_lost_process_is_told_from_a_text_that_ends_it(make_pool, tmp_path):
    pool, calls, lost = make_pool(die_at_first), tmp_path / "calls", []
    calls.touch()
    pool.repeat_lost(lost.append, 1.0)
    rows = [make_row(how, calls) for how in (None, "killed", "os._exit", "masked signal", None)]
    scores = pool.score(["0", "1", "2", "3", "4"], rows)
    assert scores.values == [0.0, 1.0, DEFAULT, DEFAULT, 4.0]
    assert scores.failures == {"died": 1, "timeout": 1} and [list(each) for each in lost] == [["reward worker 0"]]
    assert lost[0]["reward worker 0"].startswith("died (killed")
    assert calls.read_text().split() == ["0", "1", "1", "2", "2", "3", "3", "4"]


def test_a_text_is_not_to_blame_for_what_rays_memory_monitor_ends(make_pool, tmp_path, monkeypatch):
    """Where none may be lost too; the second time it is."""
    from rlworker.errors import MONITOR
    from rlworker.rewards import pool as reward_pool

    explain = reward_pool.explain_death
    monkeypatch.setattr(reward_pool, "explain_death", lambda part: explain(part) and f"{MONITOR}, holding 3 GiB")
    pool, calls = make_pool(die_at_first), tmp_path / "calls"
    calls.touch()
    scores = pool.score(["0", "1", "2"], [make_row(how, calls) for how in (None, "killed", "os._exit")])
    assert scores.values == [0.0, 1.0, DEFAULT] and scores.failures == {"died": 1}
    assert scores.examples[0].message == f"its process {MONITOR}, holding 3 GiB"
    assert calls.read_text().split() == ["0", "1", "1", "2", "2"]


def test_a_process_that_stands_still_between_two_calls_is_named_and_replaced(make_pool):
    pool, lost = make_pool(process_id), []
    pool.repeat_lost(lost.append, 1.0)
    (pid,) = pool.score(["a"], [make_row(None)]).values
    os.kill(int(pid), signal.SIGSTOP)
    (other,) = pool.score(["a"], [make_row(None)]).values
    assert other != pid and lost == [{"reward worker 0": "got no further and was ended"}]
    assert is_gone(int(pid))
