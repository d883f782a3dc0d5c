"""CPU-seconds of a process and of all that come from it."""

from collections import Counter
from typing import NamedTuple

import psutil

_TRIES = 3


class Reading(NamedTuple):
    """CPU-seconds of a process, and the parent that will be told of them when it ends.

    Attributes:
        seconds: its own CPU-seconds, and those of its children that ended and were waited for.
        waited_for: the latter alone.
        parent: its parent, where that belongs to the tree; a process outlives the one that started it.
    """

    seconds: float
    waited_for: float
    parent: psutil.Process | None


class ProcessTree:
    """CPU-seconds of a process tree, those of ended processes included once.

    The kernel adds what an ended process used to its parent, but only when the parent waits for it. Ray's raylet waits
    for none of its workers, and a parent may end first. So what is missing from the parent of a process that ended is
    taken from the last reading. What such a process used after that is lost: readings should follow each other.

    Args:
        pid: the process at the top; this one by default.
    """

    def __init__(self, pid: int | None = None):
        self._top = psutil.Process(pid)
        self._last: dict[psutil.Process, Reading] = {}
        self._unaccounted = 0.0

    def read_seconds(self) -> float:
        """Read the CPU-seconds that the tree has used by now. It takes some 10 ms where thirty processes live."""
        for _ in range(_TRIES):
            now = self._read()
            # One that is waited for meanwhile may be in its parent's reading as well as in its own.
            if all(process.is_running() for process in now):
                break
        ended_seconds = Counter()
        for process, reading in self._last.items():
            if process not in now:
                ended_seconds[self._find_heir(process, now)] += reading.seconds
        for heir, seconds in ended_seconds.items():
            waited_for = now[heir].waited_for - self._last[heir].waited_for if heir else 0.0
            self._unaccounted += max(0.0, seconds - waited_for)
        self._last = now
        return self._unaccounted + sum(reading.seconds for reading in now.values())

    def _find_heir(self, process: psutil.Process, now: dict[psutil.Process, Reading]) -> psutil.Process | None:
        """Find the nearest living ancestor, which has its time where everyone waited; None where there is none."""
        while process and process not in now:
            process = self._last[process].parent if process in self._last else None
        return process

    def _read(self) -> dict[psutil.Process, Reading]:
        members = [self._top, *self._top.children(recursive=True)]
        for orphan in self._last:
            if orphan not in members and orphan.is_running():
                members += {orphan, *orphan.children(recursive=True)}.difference(members)
        by_pid = {process.pid: process for process in members}
        readings = {}
        for process in reversed(members):  # so that one which ends meanwhile is in its parent's reading
            try:
                with process.oneshot():
                    times, parent = process.cpu_times(), by_pid.get(process.ppid())
            except psutil.NoSuchProcess:
                continue
            waited_for = times.children_user + times.children_system
            readings[process] = Reading(times.user + times.system + waited_for, waited_for, parent)
        return readings
