"""Tools that hang, leave children behind, eat memory or die: each is its own call's failure, and nothing is left."""

import asyncio
import os
import signal
import socket
import time
from ctypes import CDLL

import psutil
import pytest

from rlworker.environments import ToolFailure
from rlworker.environments.tools.runner import ToolRunner, read_outcome
from rlworker.environments.user_code import name_function

LIMIT_S = 1.0
"""For tools that hang; those that return have a minute, however busy the machine is."""
MARK = "rlworker_test_of_tools"


def add(a, b):
    return a + b


def sleep_for_ever(*_):
    time.sleep(600)


def mark_environment() -> None:
    """Name this process and its children, so that a test can find what is left of them."""
    os.environ[MARK] = "1"
    CDLL(None).prctl(15, MARK[:15].encode())


def leave_daemon():
    """Fork a child, which forks another in a session of its own, and return."""
    mark_environment()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            sleep_for_ever()
        os._exit(0)
    time.sleep(0.1)
    return "left"


def leave_and_exit():
    mark_environment()
    if os.fork() == 0:
        sleep_for_ever()
    os._exit(3)


def fork_many():
    mark_environment()
    for _ in range(60):
        if os.fork() == 0:
            sleep_for_ever()
    sleep_for_ever()


def hold_the_pipe():
    """Leave a child that keeps every file open, the one of the result too."""
    mark_environment()
    if os.fork() == 0:
        sleep_for_ever()
    return "returned"


def ignore_signals():
    mark_environment()
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    sleep_for_ever()


def eat_memory():
    return [bytearray(10 << 20) for _ in range(10000)]


def open_files():
    return [socket.socketpair() for _ in range(1000)]


def kill_itself():
    os.kill(os.getpid(), signal.SIGSEGV)


def fail():
    raise KeyError("level")


FAULTS = {
    sleep_for_ever: ("timeout", "no end after 1 s"),
    ignore_signals: ("timeout", "no end after 1 s"),
    fork_many: ("timeout", "no end after 1 s"),
    leave_and_exit: ("died", "its process exited with status 3 before it returned"),
    kill_itself: ("died", "its process was ended by SIGSEGV"),
    eat_memory: ("memory", "it needs more than 64 MB"),
    open_files: ("raised", "OSError: [Errno 24] Too many open files"),
    fail: ("raised", "KeyError: 'level', at"),
    socket.socketpair: ("unpicklable", "cannot be sent"),
}
HANGING = (sleep_for_ever, ignore_signals, fork_many)


@pytest.fixture(scope="module")
def call():
    """``call(function, *args)`` -> what it returned, or its failure, and seconds; one program forks for all."""
    loop = asyncio.new_event_loop()
    runner = ToolRunner()

    def call_tool(function, *args, **keywords):
        start = time.monotonic()
        limit_s = LIMIT_S if function in HANGING else 60.0
        outcome = loop.run_until_complete(runner.call(function, args, keywords, limit_s, 64))
        try:
            result = read_outcome(outcome, name_function(function))
        except ToolFailure as failure:
            result = failure
        return result, time.monotonic() - start

    yield call_tool
    runner.close()
    loop.close()


def find_marked() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == MARK[:15]]


@pytest.mark.parametrize("function", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_of_a_tool_is_named_within_its_limit(call, function):
    failure, seconds = call(function)
    kind, message = FAULTS[function]
    assert isinstance(failure, ToolFailure) and failure.kind == kind, failure
    assert function.__name__ in failure.message and message in failure.message
    assert seconds < LIMIT_S + 30 and not find_marked()


@pytest.mark.parametrize(("function", "result"), [(leave_daemon, "left"), (hold_the_pipe, "returned")])
def test_what_a_tool_leaves_behind_is_ended(call, function, result):
    assert call(function)[0] == result
    assert not find_marked()


def test_tools_return_what_they_return(call):
    assert call(add, 1, 2)[0] == 3 and call(add, "x" * 10**6, "y")[0][-2:] == "xy"
    factor = 7
    assert call(lambda x: x * factor, 6)[0] == 42, "what is in scope goes along"
    assert call(os.getsid, 0)[0] != os.getsid(0), "a session of its own"


def test_data_that_come_with_functions_do_not_stay(call):
    """Each is another function; 60 of them bring 120 MB."""
    call(add, 1, 2)
    living = (each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE)
    (server,) = (each for each in living if "server.py" in " ".join(each.cmdline()))
    before = server.memory_info().rss
    for number in range(60):
        text = f"{number:02}" * 2**20
        assert call(lambda text=text: text[:2])[0] == text[:2]
    assert server.memory_info().rss - before < 100 * 2**20


def test_what_cannot_be_sent_is_refused(call):
    with pytest.raises(ValueError, match=r"tool: add \(.*:\d+\) cannot be sent"):
        call(add, socket.socketpair()[0], 1)


def test_a_call_that_is_given_up_ends(call):
    loop, runner = asyncio.new_event_loop(), ToolRunner()

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runner.call(fork_many, (), {}, 600.0, 64), 0.5)

    loop.run_until_complete(give_up())
    runner.close()
    loop.close()
    end = time.monotonic() + 5
    while find_marked() and time.monotonic() < end:
        time.sleep(0.05)
    assert not find_marked()
