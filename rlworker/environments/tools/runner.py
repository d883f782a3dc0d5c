"""Run each tool call in a separate process, which a small program forks (``server.py``)."""

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlworker.environments.policy import ToolFailure
from rlworker.environments.tools import server
from rlworker.environments.tools.server import FAILED, HEADER, RETURNED, tell_failure
from rlworker.environments.user_code import name_function

_LOAD_S = 30.0
"""Seconds beyond a call's limit that the program may take to load functions, with all that their modules import."""
_CALLS_PER_CORE = 2


class ToolRunner:
    """Runs the tool calls of this process, at most a few at a time on each core. The forking program starts at the
    first call.

    All calls must come from one event loop.
    """

    def __init__(self):
        self._server: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._room = asyncio.Semaphore(_CALLS_PER_CORE * len(os.sched_getaffinity(0)))

    async def call(
        self, function: Callable, args: tuple, keywords: Mapping[str, Any], limit_s: float, memory_mb: int
    ) -> bytes:
        """Call ``function(*args, **keywords)`` and return its outcome as bytes for ``read_outcome``.

        Args:
            limit_s: most seconds. memory_mb: most memory in MB.

        Raises:
            ValueError: function or arguments cannot be sent to another process.
        """
        code, arguments = _pickle_call(function, args, keywords)
        header = HEADER.pack(limit_s, memory_mb, len(code), len(arguments))
        async with self._room:
            ours = self._connect()
            with ours:
                try:
                    outcome = await asyncio.wait_for(_exchange(ours, header + code + arguments), limit_s + _LOAD_S)
                except TimeoutError:
                    self.close()  # it hangs in what some module does when it is imported
                    outcome = tell_failure("timeout", f"its module was not imported within {_LOAD_S:g} s")
        return outcome or tell_failure("died", "the program that forks tools has ended")

    def _connect(self) -> socket.socket:
        """Open a connection to the program, started where there is none."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            if self._server is None or self._server.poll() is not None:
                self._start()
            assert self._control
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        return ours

    def _start(self) -> None:
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            # -P, or the modules beside it would hide those of the same names.
            command = [sys.executable, "-P", str(Path(server.__file__)), str(theirs.fileno())]
            paths = [path for path in (*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path) if path]
            self._server = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
                stdin=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End the forking program. The guards of running calls notice and end the calls."""
        if self._control:
            self._control.close()
        if self._server:
            self._server.kill()
            self._server.wait()
        self._server = self._control = None


def _pickle_call(function: Callable, args: tuple, keywords: Mapping[str, Any]) -> tuple[bytes, bytes]:
    from ray.cloudpickle.cloudpickle_fast import dumps  # takes a while, and not every environment has tools

    try:
        return dumps(function), dumps((args, dict(keywords)))
    except Exception as error:  # whatever an object of the user's raises when it is pickled
        raise ValueError(f"tool: {name_function(function)} cannot be sent to another process ({error})") from error


async def _exchange(connection: socket.socket, question: bytes) -> bytes:
    loop, answer = asyncio.get_running_loop(), bytearray()
    try:
        await loop.sock_sendall(connection, question)
        while part := await loop.sock_recv(connection, 1 << 18):
            answer += part
    except ConnectionError:
        return b""
    return bytes(answer)


def read_outcome(outcome: bytes, name: str) -> Any:
    """Return the result of the tool called ``name`` from its outcome.

    Raises:
        ToolFailure: the call failed, or its result cannot be unpickled here.
    """
    kind, data = outcome[:1], outcome[1:]
    if kind == FAILED:
        why, message = json.loads(data)
        raise ToolFailure(why, f"{name}: {message}")
    assert kind == RETURNED
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ToolFailure("unpicklable", f"{name}: {type(error).__name__}: {error}") from error
