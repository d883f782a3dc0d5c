"""Signals that ask a program to end: SIGTERM, which schedulers send, and SIGINT, which Ctrl-C sends."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import psutil

from rlworker.base.errors import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a run at the end of its step."""


class Stop:
    """Handles SIGTERM and SIGINT while it is entered.

    The first signal lets the current step finish, if there is one (``in_hand``). The second signal ends the program at
    once, with every process that it started; so does the first if no step would be lost. The run folder is left as a
    kill would leave it, so that ``--resume`` works.

    Attributes:
        signal: number of the first signal; 0 before.
        in_hand: description of the step to finish first; empty where there is none.
    """

    def __init__(self):
        self.signal = 0
        self.in_hand = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # Python lets no other ask for signals
            self._before = {number: signal.signal(number, self._handle_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def exit_status(self) -> int:
        """Exit status of a program that a signal ended, as shells count: 128 plus the signal's number."""
        return 128 + self.signal

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.signal and self.in_hand:
            self.signal = number
            _say(f"{name}: finishing {self.in_hand}, then the run is saved and ends; once more ends it at once")
            return
        again = bool(self.signal)
        self.signal = self.signal or number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        _say(f"{name}: ends at once; " + ("the newest checkpoint stands" if again else "no step was under way"))
        for child in psutil.Process().children(recursive=True):  # every process that this one started, and theirs
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(self.exit_status)  # whatever unwinding would do may wait for one of those that just ended


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Run a program that trains: a ``RunError`` ends it with its message, and signals end it as ``Stop`` says.

    Raises:
        SystemExit: with the error's message, or with ``exit_status`` if a signal ended the run before its last step.
    """
    with Stop() as stop:
        try:
            yield stop
        except RunError as error:
            sys.exit(f"error: {error}")
        if stop.signal and stop.in_hand:
            sys.exit(stop.exit_status)


def _say(text: str) -> None:
    """Print a line in the middle of other work, which may be printing."""
    with suppress(RuntimeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode() if os.isatty(2) else f"{text}\n".encode())
