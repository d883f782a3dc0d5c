"""The processes of an engine of several devices: how they end, and that nothing of them stays."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux' prctl: the signal that this process gets when its parent ends."""
_SHARED = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
"""What the names of vLLM's shared memory begin with: queues to and from workers, and buffers of their collectives."""


def end_with_parent() -> None:
    """Have this process end with its parent, however that ends, in the middle of any computation.

    vLLM's workers see a parent that ended between two calls. One that is stopped, or waits in a collective for another
    that ended first, would stay.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def unlink_shared_memory() -> None:
    """Take the names of the memory that this process shares with the engine's others away, once all of them have it.

    Memory without a name goes with the last of them. With one it would stay in /dev/shm where they are killed, and Ray
    ends its workers so.
    """
    if sys.platform != "linux":
        return
    places = (line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {place[0] for place in places if place and place[0].startswith(_SHARED)}:
        with suppress(FileNotFoundError):
            os.unlink(path)  # it raises where another of them was first
            if path.startswith(_SHARED[0]):
                resource_tracker.unregister(f"/{os.path.basename(path)}", "shared_memory")
