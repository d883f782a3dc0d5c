"""Starting a run's processes: Ray, and imports that take seconds."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def ray_for(actors: int) -> Iterator[None]:
    """Ray with room for ``actors``: one that runs in this program, the cluster of RAY_ADDRESS, or a new one.

    A new one belongs to this program alone. A small machine may hold more actors than it has cores: they take turns.
    What was started (or joined) here is left at the end.

    Raises:
        RuntimeError: Ray has too few CPUs for the actors, which would wait for them for ever.
    """
    mine = not ray.is_initialized()
    if mine:
        # Ray would otherwise warn at every start about devices that actors without one can see.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet = dict(logging_level="ERROR", log_to_driver=False)
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
        else:
            cpus = max(actors, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=2**30, **quiet)
    try:
        have = ray.cluster_resources().get("CPU", 0)
        if have < actors:
            raise RuntimeError(f"ray: the run's actors need {actors} CPUs and Ray has {have:.0f}; start it with more")
        yield
    finally:
        if mine:
            ray.shutdown()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while something heavy is imported and built.

    A million objects come with torch, Megatron or vLLM and none of them goes, so that looking through them takes a fifth
    of the time. They are left out of every later collection too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
