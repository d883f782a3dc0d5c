"""End the processes of an engine of several devices with the engine, and leave nothing of them."""

import ctypes
import os
import re
import signal
import sys
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm import LLM

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux' prctl: sets the signal that this process gets when its parent ends."""
_QUEUE = "/dev/shm/psm_"
"""Beginning of the names of the shared memory of vLLM's queues of workers."""
_SHARED = re.compile(rf"{_QUEUE}|/dev/shm/vllm_dist_|/dev/shm/\d+-.*-cpushm_")
"""Beginnings of the names of vLLM's shared memory: queues of workers, and buffers of collectives, whose names begin
with a number in 0.23 and 0.26."""


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends.

    vLLM's workers notice the end of their parent only between two calls. A worker that is stopped, or that waits in a
    collective for a process that ended, would stay alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def tie_to_engine(_worker: object) -> None:
    """Make a worker's process end with its engine's, without leaving anything behind; called in that process."""
    end_with_parent()
    unlink_shared_memory()


def tie_workers(llm: "LLM") -> None:
    """Have the processes of an engine's devices end with this one, and this one with any of them.

    An engine that lost a device is lost, and is found to be so as any process that ended.
    """
    llm.collective_rpc("run_function", args=(f"{__name__}:{tie_to_engine.__name__}",))
    unlink_shared_memory()
    executor = cast(Any, llm.llm_engine.engine_core).engine_core.model_executor
    executor.register_failure_callback(partial(os._exit, 1))


def unlink_shared_memory() -> None:
    """Unlink the shared memory of this engine's processes, after all of them have mapped it.

    Memory without a name is freed with its last process. With a name it would stay in /dev/shm when the processes are
    killed, and Ray kills its workers.
    """
    if sys.platform != "linux":
        return
    places = (line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {place[0] for place in places if place and _SHARED.match(place[0])}:
        with suppress(FileNotFoundError):
            os.unlink(path)  # it raises where another of them was first
            if path.startswith(_QUEUE):
                resource_tracker.unregister(f"/{os.path.basename(path)}", "shared_memory")
