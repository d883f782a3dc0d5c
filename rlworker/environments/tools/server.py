"""The program that forks a process for each tool call; ``runner.py`` starts it and sends it the calls.

It is run by its path and imports nothing of this project, since a fork takes everything that is in memory. It loads a
function once, with everything that it imports, so that later calls find it loaded.

Each call has a guard process, the parent of everything that the tool starts, however often that forks and leaves its
parent. The guard passes the result on, and ends all of these processes when the call is over, late or given up.
"""

import gc
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL
from functools import lru_cache
from typing import Any

HEADER = struct.Struct("!dQQQ")
"""Header of a call: seconds, MB, bytes of the function, bytes of its arguments."""
LENGTH = struct.Struct("!Q")
RETURNED, FAILED = b"R", b"F"
"""First byte of an outcome: before a pickled result, or before the kind and message of a failure in JSON."""

_PR_SET_CHILD_SUBREAPER = 36
_FILES = 256
_BALLAST = 1 << 20
"""Bytes that are given up to tell that there is no memory left."""
_MESSAGE_CHARACTERS = 300
_FUNCTIONS = 16
"""Functions that stay loaded, those that were called last."""

Loaded = tuple[Callable | None, str]
"""A function, or why there is none."""


def serve(control: socket.socket) -> None:
    """Fork a guard process for every connection that comes through ``control``, until its other end is closed."""
    load = lru_cache(_FUNCTIONS)(_load)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards that have ended leave nothing behind
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as call:
            try:
                limit_s, memory_mb, *sizes = HEADER.unpack(_receive(call, HEADER.size))
                loaded = load(_receive(call, sizes[0]))
            except EOFError:
                continue  # given up
            if os.fork() == 0:
                control.close()
                _guard(call, loaded, sizes[1], limit_s, memory_mb)


def _load(code: bytes) -> Loaded:
    """Load a function. What modules brought stays, and is kept from the collector, which would copy it in each guard;
    a function may hold data of one call, and goes when others have come."""
    modules = len(sys.modules)
    try:
        return pickle.loads(code), ""
    except BaseException as error:  # whatever the import of a module of the user's raises
        return None, f"it cannot be loaded: {_describe(error)}"
    finally:
        if len(sys.modules) > modules:
            gc.freeze()


def _guard(call: socket.socket, loaded: Loaded, size: int, limit_s: float, memory_mb: int) -> None:
    """Run the tool in a child, pass its outcome on, and end all processes that it has started."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        arguments = _receive(call, size)
        read_end, write_end = os.pipe()
        if (tool := os.fork()) == 0:
            os.close(read_end)
            call.close()
            _run(write_end, loaded, arguments, limit_s, memory_mb)
        os.close(write_end)
        outcome = _await_outcome(call, read_end, tool, limit_s)
        _end_descendants()
        call.sendall(outcome)
    except (EOFError, OSError):
        _end_descendants()  # nobody is there to hear
    finally:
        os._exit(0)


def _await_outcome(call: socket.socket, pipe: int, tool: int, limit_s: float) -> bytes:
    """Wait for the result, the end of the tool's process, its limit, or the end of the asking process."""
    deadline, data, process = time.monotonic() + limit_s, bytearray(), os.pidfd_open(tool)
    poll = select.poll()
    for descriptor in (pipe, process, call.fileno()):
        poll.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(left * 1e3)}
        if pipe in ready:
            if part := os.read(pipe, 1 << 20):
                data += part
            else:
                poll.unregister(pipe)
            if len(data) >= LENGTH.size and len(data) >= (end := LENGTH.size + LENGTH.unpack_from(data)[0]):
                return bytes(data[LENGTH.size : end])  # a child of the tool may have written one more
        elif process in ready:
            _, status = os.waitpid(tool, 0)
            return tell_failure("died", _tell_end(os.waitstatus_to_exitcode(status)))
        elif call.fileno() in ready:
            raise EOFError
    return tell_failure("timeout", f"no end after {limit_s:g} s")


def _tell_end(code: int) -> str:
    if code >= 0:
        return f"its process exited with status {code} before it returned"
    reason = "; it took more processor time than its limit" if -code == signal.SIGXCPU else ""
    return f"its process was ended by {signal.Signals(-code).name}{reason}"


def _end_descendants() -> None:
    """End all children until there are none: those of a child that ended become ours."""
    while True:
        for pid in _list_descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _list_descendants(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
    except OSError:
        return []
    return [*children, *(pid for child in children for pid in _list_descendants(child))]


def _run(pipe: int, loaded: Loaded, arguments: bytes, limit_s: float, memory_mb: int) -> None:
    """Call the tool and write its outcome; this process ends here."""
    ballast = bytearray(_BALLAST)
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _set_limits(limit_s, memory_mb)
        outcome = _call(loaded, arguments)
    except MemoryError:
        del ballast
        outcome = tell_failure("memory", f"it needs more than {memory_mb} MB")
    except BaseException as error:  # sys.exit() too is only this call's failure
        outcome = tell_failure("raised", _describe(error))
    data = memoryview(LENGTH.pack(len(outcome)) + outcome)
    while data:
        data = data[os.write(pipe, data) :]
    sys.stdout.flush()
    os._exit(0)


def _call(loaded: Loaded, arguments: bytes) -> bytes:
    function, reason = loaded
    if function is None:
        return tell_failure("raised", reason)
    args, keywords = pickle.loads(arguments)
    result = function(*args, **keywords)
    if hasattr(result, "__await__"):  # of an async function, or of one that wraps it
        import asyncio

        result = asyncio.run(_await(result))
    try:
        return RETURNED + pickle.dumps(result, protocol=5)
    except MemoryError:
        raise
    except Exception as error:
        return tell_failure(
            "unpicklable", f"a {type(result).__name__} cannot be sent ({type(error).__name__}: {error})"
        )


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _set_limits(limit_s: float, memory_mb: int) -> None:
    with open("/proc/self/statm") as file:
        start = int(file.read().split()[0]) * resource.getpagesize()
    seconds = math.ceil(limit_s) + 1
    limits = {
        resource.RLIMIT_AS: start + (memory_mb << 20),
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _FILES,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def tell_failure(kind: str, message: str) -> bytes:
    """Encode a failure as an outcome."""
    return FAILED + json.dumps([kind, message]).encode()


def _describe(error: BaseException) -> str:
    """Tell type, message and line of an error."""
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    where = f", at {places[-1]}" if places and not places[-1].startswith(__file__) else ""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be made)"
    return f"{type(error).__name__}: {message[:_MESSAGE_CHARACTERS]}{where}"


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
