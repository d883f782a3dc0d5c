"""The state of a process: one that is starved or busy is told from one that stands still.

Without torch or an engine: a node's answer is given by a small process of Ray.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlworker.cluster.placement import pin_to

_LOOKS, _LOOK_S = 20, 0.05
"""Looks at a process, and the seconds between two of them."""
_BUSY_LOOKS = 3
"""Looks that find work in a process which computes. The threads of Ray alone, in one that waits, have less of it."""
_COMPUTING = "RD"
"""States of a thread that has work: it runs or waits for a core, or for the memory or disk that it reads from."""
_ANSWER_S = 6.0
"""Seconds that another node has to tell of a process."""


@dataclass(frozen=True)
class ProcessPlace:
    """The place of a process: Ray's id of its node, and its number there."""

    node: str
    pid: int


def find_own_place() -> ProcessPlace:
    """Find the place of this process, one of Ray's."""
    return ProcessPlace(ray.get_runtime_context().get_node_id(), os.getpid())


def is_computing(place: ProcessPlace) -> bool:
    """Tell whether some thread of a process has work at several of a second's looks.

    A stopped process, or one that waits for another, has none. One that has too little of a busy machine does.
    False where its node does not answer.
    """
    if place.node == ray.get_runtime_context().get_node_id():
        return look_at(place.pid)
    asked = ray.remote(look_at).options(num_cpus=0, max_retries=0, scheduling_strategy=pin_to(place.node))
    try:
        return ray.get(asked.remote(place.pid), timeout=_ANSWER_S)
    except (GetTimeoutError, RayError):
        return False


def look_at(pid: int) -> bool:
    """Look at a process of this machine for a second: ``is_computing`` of it."""
    busy = 0
    for _ in range(_LOOKS):
        busy += _has_work(pid)
        time.sleep(_LOOK_S)
    return busy >= _BUSY_LOOKS


def _has_work(pid: int) -> bool:
    return any(_read_state(task) in _COMPUTING for task in Path(f"/proc/{pid}/task").glob("*"))


def _read_state(task: Path) -> str:
    """Read a thread's state, one letter (proc(5), stat); Z where it has just ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
