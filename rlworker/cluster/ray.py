"""Ray: how it starts, and how imports go fast in its processes."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from hardware.platform import list_ray_resources
from hardware.platforms import get_platform
from rlworker.errors import RunError

_HELD_BACK = threading.Event()
"""Set while a SIGTERM waits for the end of ``ray.init``."""


@contextmanager
def running_ray(workers: int, platform: str) -> Iterator[None]:
    """Run Ray with room for some workers of a platform: this program's, the cluster of RAY_ADDRESS, or a new one.

    A new one belongs to this program alone. A small machine may hold more workers than it has cores: they take turns.
    What was started (or joined) here is left at the end.

    Raises:
        RunError: Ray does not start, or has too few CPUs or devices for the workers, which would wait for ever.
    """
    mine = not ray.is_initialized()
    if mine:
        # Ray would otherwise warn at every start about devices that processes without one can see.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = dict(logging_level="ERROR", log_to_driver=False)
        try:
            with _keeping_handler():
                if os.environ.get("RAY_ADDRESS"):
                    ray.init(**quiet)
                else:
                    cpus = max(workers, os.cpu_count() or 1)
                    new: dict[str, Any] = dict(num_cpus=cpus, include_dashboard=False, object_store_memory=2**30)
                    ray.init(address="local", **new, **quiet)
        except Exception as error:  # Ray's own are of the plainest kind
            raise RunError(
                f"ray: it did not start ({error}); where this machine is busy, try again, and where RAY_ADDRESS names "
                "a cluster, see that it runs"
            ) from error
    try:
        have = ray.cluster_resources()
        for name, each in list_ray_resources(get_platform(platform)).items():
            if have.get(name, 0) < workers * each:
                raise RunError(
                    f"ray: the run's workers need {workers * each} {name}s and Ray has {have.get(name, 0):.0f}; start "
                    "it with more"
                )
        yield
    finally:
        if mine:
            ray.shutdown()


@contextmanager
def _keeping_handler() -> Iterator[None]:
    """Keep what this program does at SIGTERM: ``ray.init`` exits at one, and leaves a handler that prints a stack.

    One that comes meanwhile waits until our own handler is back. The processes that Ray starts do not wait.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    if not callable(handler):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _HELD_BACK.set()
    try:
        yield
    finally:
        _HELD_BACK.clear()
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _release_child() -> None:
    """Let a process that is forked while SIGTERM is held back here have its own: it would inherit that."""
    if _HELD_BACK.is_set():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(after_in_child=_release_child)


@contextmanager
def pausing_collection() -> Iterator[None]:
    """Collect no garbage while something heavy is imported and built.

    A million objects come with torch, Megatron or vLLM and none of them goes, so that looking through them takes a
    fifth of the time. They are left out of every later collection too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
