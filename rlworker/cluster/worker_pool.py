"""Start and end the workers of a run, and keep them for later runs of this program."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from hardware.platform import list_ray_resources, make_ray_options
from hardware.platforms import get_platform
from rlworker.cluster.placement import ResourceRequest, list_nodes, pin_to, plan_nodes
from rlworker.cluster.watch import LIVENESS

POLL = "poll"
"""Concurrency group of every worker for calls that wait for results while another call runs."""
_CLOSE_S = 30.0
"""Seconds that a worker may take to drop its engines; a worker that takes longer is killed."""


@dataclass
class _Pool:
    """Workers of the runs inside ``keeping_workers``: the arguments of each, and the workers without a run."""

    started: dict[ActorHandle, tuple] = field(default_factory=dict)
    idle: dict[tuple, list[ActorHandle]] = field(default_factory=dict)


_pool: _Pool | None = None
_placed: dict[ActorHandle, tuple[str, ResourceRequest]] = {}
"""Node and request of every worker of this program, if there are several nodes."""


@contextmanager
def keeping_workers() -> Iterator[None]:
    """Keep worker processes for the next run of this program, until the end of this context.

    The imports of a worker are the longest part of a start. Around several runs this saves them: in a sweep over
    settings, a notebook or a test suite. Runs may have other models and other sizes; their results are the same.

        with running_ray(3, "cpu"), keeping_workers():
            for lr in (1e-4, 3e-4):
                with Trainer(config_of(lr), reward) as trainer:
                    trainer.fit()

    Only workers of a run that ended well are kept, and only if they drop their engines within half a minute. Ray must
    be up before this context and stay up until after it, since its end would end the workers. With several nodes no
    worker is kept, since the next run may place its ranks on other nodes.
    """
    global _pool
    before, pool = _pool, _Pool()
    _pool = pool
    try:
        yield
    finally:
        _pool = before
        for worker in (worker for workers in pool.idle.values() for worker in workers):
            ray.kill(worker)


def start_workers(
    kind: type,
    platform: str,
    arguments: Sequence[tuple],
    devices: int = 1,
    together: int = 1,
    nodes: Sequence[str] = (),
) -> list[ActorHandle]:
    """Start workers of class ``kind``, one for each tuple in ``arguments``, and return their handles.

    A kept worker is taken if it was started with the same arguments, so that its name in messages stays right.

    Args:
        arguments: for each worker, the arguments of ``kind`` after the name of the platform.
        devices: number of devices of each worker. together: number of consecutive workers that must be on one node.
        nodes: node of each worker; empty lets ``plan_nodes`` choose.

    Raises:
        RunError: there are several nodes, and none has room.
    """
    options = make_ray_options(get_platform(platform), devices)
    make_remote: Any = ray.remote
    remote_class = make_remote(concurrency_groups={LIVENESS: 1, POLL: 1})(kind)
    keys = [(kind, devices, platform, *further) for further in arguments]
    if len(every := list_nodes()) > 1:
        demand = ResourceRequest(kind.__name__, platform, len(keys), devices, together)
        places = nodes or plan_nodes(every, [demand], _placed.values())[0]
        pinned = [remote_class.options(**options, scheduling_strategy=pin_to(node)) for node in places]
        workers = [each.remote(*key[2:]) for each, key in zip(pinned, keys, strict=True)]
        _placed.update(zip(workers, ((node, demand) for node in places), strict=True))
        return workers
    remote_class, pool = remote_class.options(**options), _pool
    if not pool:
        return [remote_class.remote(*key[2:]) for key in keys]
    idle_workers = [pool.idle[key].pop() if pool.idle.get(key) else None for key in keys]
    pool.started |= {worker: key for worker, key in zip(idle_workers, keys, strict=True) if worker}
    _make_room(pool, [(devices, platform)] * idle_workers.count(None))
    workers = [worker or remote_class.remote(*key[2:]) for worker, key in zip(idle_workers, keys, strict=True)]
    pool.started |= zip(workers, keys, strict=True)
    return workers


def _make_room(pool: _Pool, new: list[tuple[int, str]]) -> None:
    """End the kept workers without a run where Ray could not place new workers beside them, which would wait for ever.

    Args:
        new: devices and platform of each.
    """
    idle = [(key, worker) for key, workers in pool.idle.items() for worker in workers]
    demand = Counter()
    for devices, name in new + [key[1:3] for key in (*pool.started.values(), *(key for key, _ in idle))]:
        demand.update(list_ray_resources(get_platform(name), devices))
    have = ray.cluster_resources()
    if any(need > have.get(resource, 0) for resource, need in demand.items()):
        pool.idle.clear()
        for _, worker in idle:
            ray.kill(worker)


def end_workers(workers: Sequence[ActorHandle], keep: bool) -> None:
    """End workers, or keep them for a later run in ``keeping_workers``.

    Args:
        keep: whether the run ended well; after a failure a worker may hang in a collective, or hold half an update.
    """
    pool = _pool or _Pool()
    closing: dict[Any, ActorHandle] = {w.close.remote(): w for w in workers if keep and w in pool.started}
    done, _ = ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_S) if closing else ([], [])
    closed = {closing[reference] for reference in done if _is_fine(reference)}  # they gave up their engines in time
    for worker in workers:
        _placed.pop(worker, None)
        key = pool.started.pop(worker, None)
        if key and worker in closed:
            pool.idle.setdefault(key, []).append(worker)
        else:
            ray.kill(worker)


def _is_fine(reference: Any) -> bool:
    try:
        ray.get(reference)
    except RayError:
        return False
    return True
