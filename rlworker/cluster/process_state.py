"""The state of a process: whether a silent process computes or hangs, and how a process was lost.

The module imports neither torch nor an engine, since a small Ray process runs it on other nodes.
"""

import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from rlworker.base.errors import MONITOR
from rlworker.cluster.placement import pin_to

_LOOKS, _LOOK_S = 20, 0.05
"""Number of looks at a process, and seconds between two looks."""
_BUSY_LOOKS = 3
"""Number of looks that must find work for a process to count as computing. Ray's own threads in a waiting process have
less."""
_COMPUTING = "RD"
"""States of a thread that has work: it runs or waits for a core, or for the memory or disk that it reads from."""
_ANSWER_S = 6.0
"""Seconds that another node has to report on a process."""

LOSSES = (
    RayActorError,
    OutOfMemoryError,  # of Ray's memory monitor, which ends processes before the kernel would
    WorkerCrashedError,
    NodeDiedError,
    LocalRayletDiedError,
    ActorUnschedulableError,  # its node has gone
    TaskUnschedulableError,
)
"""Errors by which Ray reports that a process is gone or cannot be reached."""
DRIVER_LOST = "lost Ray, which crashed or was killed on the machine of this program"
"""How every process was lost if Ray is gone from under the driver, which cannot start any other process."""
UNREACHED = "could not be reached"
"""How a process was lost if Ray cannot tell yet whether it lives: its connection is gone."""
_DIED = "died (killed, out of memory or crashed; Ray's logs say more)"
_NODE_DIED = "died with its machine, or with Ray there"
_NO_ROOM = re.compile(
    "|".join(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
    + "|PytorchStreamWriter failed writing"
)
"""Messages of libraries in a worker that cannot write, whatever the type of the error."""
_FULL = {
    ObjectStoreFullError: "Ray's object store is full: start Ray with more (`ray start --object-store-memory BYTES`)",
    OutOfDiskError: "the disk is full that Ray keeps its files on: make room there, or set TMPDIR to another folder",
}
_NODE_MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")
_OWN_MEMORY = r"\(Actor\({}\)[^\n]* actual memory used=([\d.]+)GB"
"""Messages of Ray's memory monitor about a node, and about an actor that it ended; "GB" means GiB there (Ray 2.60)."""


@dataclass(frozen=True)
class ProcessPlace:
    """The place of a process: Ray's id of the node, and the process id there."""

    node: str
    pid: int


def is_computing(place: ProcessPlace) -> bool:
    """Tell whether a process has work, by watching its threads for a second.

    A stopped process, or one that waits for another, has no work. A process that gets too little of a busy machine has.
    The result is False if the node does not answer.
    """
    if place.node == ray.get_runtime_context().get_node_id():
        return look_at(place.pid)
    asked = ray.remote(look_at).options(num_cpus=0, max_retries=0, scheduling_strategy=pin_to(place.node))
    try:
        return ray.get(asked.remote(place.pid), timeout=_ANSWER_S)
    except (GetTimeoutError, RayError):
        return False


def look_at(pid: int) -> bool:
    """Watch a process of this machine for a second, and tell whether any thread has work, as ``is_computing`` does."""
    busy = 0
    for _ in range(_LOOKS):
        busy += any(_read_state(task) in _COMPUTING for task in Path(f"/proc/{pid}/task").glob("*"))
        time.sleep(_LOOK_S)
    return busy >= _BUSY_LOOKS


def _read_state(task: Path) -> str:
    """Read a thread's state, one letter (proc(5), stat); Z where it has just ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_lost(error: RayError) -> bool:
    """Tell whether the error of a call means that the called process is lost.

    A RayTaskError, raised inside a process, may be of the same kinds: it then tells of another process.
    """
    return isinstance(error, LOSSES) and not isinstance(error, RayTaskError)


def explain(error: BaseException, worker: ActorHandle | None = None) -> str | None:
    """Describe in one line how a process or an object of Ray was lost, as the predicate to its name; None for other
    errors.

    Args:
        worker: the process, whose own memory is then included.
    """
    text = str(error)
    if isinstance(error, RayTaskError) and (full := [line for line in text.splitlines() if _NO_ROOM.search(line)]):
        return f"a disk is full ({full[-1].strip()}): make room there"
    while isinstance(error, RayTaskError):
        error = error.cause
        text = str(error)
    if isinstance(error, OutOfMemoryError):
        own = worker and re.search(_OWN_MEMORY.format(worker._actor_id.hex()), text)
        node = _NODE_MEMORY.search(text)
        held = f", holding {own[1]} GiB" if own else ""
        return MONITOR + held + (f", when {node[1]} of {node[2]} GiB of its machine were in use" if node else "")
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return _FULL[type(error)]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"did not start ({get_last_line(error)})"
    if isinstance(error, ActorUnavailableError):
        return UNREACHED
    if "owner has died" in text and "node has crashed" in text:
        return DRIVER_LOST
    if isinstance(error, ObjectLostError):
        return f"was lost ({type(error).__name__})"
    if isinstance(error, NodeDiedError | LocalRayletDiedError | ActorUnschedulableError | TaskUnschedulableError):
        return _NODE_DIED
    if isinstance(error, LOSSES):
        return _NODE_DIED if "its node has died" in text else _DIED
    return None


def get_last_line(error: BaseException) -> str:
    """Return the last line of an error's text, which names the error; the lines before it are a traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
