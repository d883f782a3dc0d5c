"""Start Ray, and speed up the imports in its processes."""

import errno
import gc
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from hardware.platform import list_ray_resources
from hardware.platforms import get_platform
from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER
from rlworker.cluster.process_state import explain, get_last_line
from rlworker.cluster.weights.sender import BUCKET_BYTES

_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"
"""Variable with the number of times that Ray tries to connect to a cluster; each attempt takes 41 s where nothing
answers, and Ray's default is 20 (2.60, _private/node.py)."""
_LATE = "timed out during startup"
"""Words of Ray's error by which the node that it starts was late."""
_CONNECT_S = 10.0
"""Seconds that the machine of RAY_ADDRESS has to accept a connection."""
_CLUSTER_ADVICE = "start the cluster (scripts/ray_up.sh), or unset RAY_ADDRESS to run on this machine alone"
_SOCKET_BYTES, _SOCKET = 107, "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Most bytes in the path of a socket (unix(7), sun_path), and the longest path of Ray's below its folder."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_SHM = "/dev/shm"
_BUCKETS = 3
"""Buckets of weights in the object store: one is loaded, one was just put there, one is being deleted."""
_LEAST_STORE = 75 * 2**20
"""Bytes of the smallest object store with which Ray starts (2.60, OBJECT_STORE_MINIMUM_MEMORY_BYTES)."""
_HELD_BACK = threading.Event()
"""Set while a SIGTERM waits for the end of ``ray.init``."""


@contextmanager
def running_ray(workers: int, platform: str, batch_bytes: int = 0) -> Iterator[None]:
    """Run Ray in this context: a Ray that this program has started already, the cluster of RAY_ADDRESS, or a new one.

    A new one is used by this program alone. A small machine may hold more workers than it has cores: they take turns. A
    Ray that was started or joined here is left at the end.

    Args:
        workers: number of devices, or of CPUs on a platform without devices, that the workers hold at once.
        platform: name of the platform.
        batch_bytes: bytes in Ray's object store while a batch travels between processes.

    Raises:
        RunError: Ray does not start, or has too few CPUs or devices, for which the workers would wait for ever.
    """
    mine = not ray.is_initialized()
    if mine:
        check_ray()
        # Ray would otherwise warn at every start about devices that processes without one can see.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = dict(logging_level="ERROR", log_to_driver=False)
        try:
            with _keeping_handler():
                if os.environ.get("RAY_ADDRESS"):
                    _join(quiet)
                else:
                    quiet |= dict(num_cpus=max(workers, os.cpu_count() or 1), include_dashboard=False)
                    _start(quiet | dict(address="local", object_store_memory=_size_store(batch_bytes)))
        except Exception as error:  # Ray's own are of the plainest kind
            address = os.environ.get("RAY_ADDRESS")
            what = f"no cluster at RAY_ADDRESS={address}" if address else "it did not start"
            raise RunError(f"ray: {what} ({get_last_line(error)}); {_advise(error)}") from error
    try:
        have = ray.cluster_resources()
        for name, each in list_ray_resources(get_platform(platform)).items():
            if have.get(name, 0) < workers * each:
                raise RunError(
                    f"ray: the run's workers need {workers * each} {name}s and Ray has {have.get(name, 0):.0f}; lower "
                    "--actor.ranks or --rollout.engines, or start Ray with more"
                )
        yield
    except RayError as error:  # between the phases of a run, in which whoever failed is named
        raise RunError(f"ray: {type(error).__name__}: {explain(error) or error}") from error
    finally:
        if mine:
            ray.shutdown()


def _size_store(batch_bytes: int) -> int:
    """Size the object store of a new Ray by its largest content; it takes memory as it fills.

    That is a batch and buckets of weights, whose size does not depend on the model. A small /dev/shm holds
    less than that, of which the user is warned.
    """
    need = _BUCKETS * BUCKET_BYTES + batch_bytes
    free = shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else 0
    if free < need:
        LOGGER.warning(
            f"ray: {_SHM} has {free / 2**30:.2f} GiB free, and a batch and the weights on their way take up to "
            f"{need / 2**30:.2f} GiB: the rest goes over the disk of TMPDIR, which is slow; give the container "
            "more, by --shm-size, or lower --prompts-per-step or --rows-per-step"
        )
    return max(min(max(need, 2**30), free), _LEAST_STORE)


def check_ray() -> None:
    """Raise an error now where the start of Ray would fail or never end: the cluster is gone, or a socket's path is too
    long.

    Raises:
        RunError: nothing listens at RAY_ADDRESS, or TMPDIR is too long.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if ray.is_initialized() or address in ("auto", "local"):
        return
    if address:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not (host and port.isdecimal()):
            raise RunError(f"ray: RAY_ADDRESS={address!r} is no host:port; {_CLUSTER_ADVICE}")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError as error:
            raise RunError(f"ray: nobody answers at RAY_ADDRESS={address} ({error}); {_CLUSTER_ADVICE}") from error
        return
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
    folder = os.environ.get(name, "/tmp")
    if (length := len(os.fsencode(folder))) > _SOCKET_BYTES - len(_SOCKET):
        raise RunError(
            f"ray: {name}={folder} has {length} bytes, and Ray's sockets are {len(_SOCKET)} bytes below it, where a "
            f"path of a socket has at most {_SOCKET_BYTES}; set {name} to a folder of at most "
            f"{_SOCKET_BYTES - len(_SOCKET)} bytes, such as /tmp"
        )


def _start(settings: dict[str, Any]) -> None:
    """Start Ray, and once more where its node was late: it has 30 s (2.60, _private/node.py), which may be too few on a
    machine where others run."""
    before = psutil.Process().children()
    try:
        ray.init(**settings)
    except Exception as error:  # Ray raises no class of its own for it
        if _LATE not in str(error):
            raise
        LOGGER.warning("ray: its node was not there after 30 s, as on a machine where others run; starting it again")
        for process in psutil.Process().children():  # Ray would end those of the failed start with this program
            if process not in before:
                process.kill()
        ray.init(**settings)


def _join(settings: dict[str, Any]) -> None:
    """Connect to the cluster of RAY_ADDRESS, or give up after one attempt where the user has not said how many."""
    is_ours = _ATTEMPTS not in os.environ
    os.environ.setdefault(_ATTEMPTS, "1")
    try:
        ray.init(**settings)
    finally:
        if is_ours:  # a Ray that is started here later would wait a second for its own server
            del os.environ[_ATTEMPTS]


def _advise(error: Exception) -> str:
    """Advise how to mend an error by which Ray did not start."""
    if os.environ.get("RAY_ADDRESS"):
        return _CLUSTER_ADVICE
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"make room in {tempfile.gettempdir()!r}, or set TMPDIR to a folder that can be written to"
    return "where this machine is busy, try again"


@contextmanager
def _keeping_handler() -> Iterator[None]:
    """Keep this program's handler of SIGTERM: ``ray.init`` exits at one, and leaves a handler that prints a stack.

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
    """Turn garbage collection off in this context, while something heavy is imported and built.

    A million objects come with torch, Megatron or vLLM and stay, so that collections in between would free nothing and
    take a fifth of the time. These objects are left out of every later collection too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
