"""A run is asked to end by SIGTERM, as schedulers do, or by SIGINT, as Ctrl-C does."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import psutil

from rlworker.errors import RunError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """The meaning of SIGTERM and SIGINT to a program while this is entered.

    The first lets the step in hand be finished, where there is one (``in_hand``). The second, and the first where no
    step would be lost, ends the program on the spot and every process that it started: as a kill would, which a run
    folder is made to bear, but within a second and without leaving anybody behind.

    Attributes:
        signal: the number of the first that came; 0 before.
        in_hand: the work to finish first, in words; empty where there is none.
    """

    def __init__(self):
        self.signal = 0
        self.in_hand = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # Python lets no other ask for signals
            self._before = {number: signal.signal(number, self._handle_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def exit_status(self) -> int:
        """The exit status of a program that was asked to end, as shells count: 128 and the signal's number."""
        return 128 + self.signal

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.signal and self.in_hand:
            self.signal = number
            _say(f"{name}: finishing {self.in_hand}, then the run is saved and ends; once more ends it at once")
            return
        again = bool(self.signal)
        self.signal = self.signal or number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        _say(f"{name}: ends at once; " + ("the newest checkpoint stands" if again else "no step was under way"))
        for child in psutil.Process().children(recursive=True):  # every process that this one started, and theirs
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(self.exit_status)  # whatever unwinding would do may wait for one of those that just ended


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Run a program that trains: a failure ends it with a message, signals end it as ``Stop`` says.

    Raises:
        SystemExit: with the message, or with the status of a program that was asked to end before its last step.
    """
    with Stop() as stop:
        try:
            yield stop
        except RunError as error:
            sys.exit(f"error: {error}")
        if stop.signal and stop.in_hand:
            sys.exit(stop.exit_status)


def block_signals() -> None:
    """Let this thread receive none of the signals that ``Stop`` hears: they are the main thread's, which may hold them
    back for a while."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _say(text: str) -> None:
    """Print a line in the middle of other work, which may be printing."""
    with suppress(RuntimeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode() if os.isatty(2) else f"{text}\n".encode())
