"""The Ray actors of a run: new processes, or ones that an earlier run of this program has left."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from hardware.platform import ray_resources
from hardware.platforms import get_platform

_CLOSE_S = 30.0
"""How long a worker may take to give up its engines; one that takes longer is ended."""


@dataclass
class _Kept:
    """Actors of the runs inside ``keeping_workers``: what each was started as, and which of them have no run."""

    made: dict[ActorHandle, tuple] = field(default_factory=dict)
    idle: dict[tuple, list[ActorHandle]] = field(default_factory=dict)


_kept: _Kept | None = None


@contextmanager
def keeping_workers() -> Iterator[None]:
    """Hand worker processes on from run to run of this program, until the end of this context.

    A worker imports for longer than anything else that a start takes. Around several runs this saves it: a sweep over
    settings, a notebook, a test suite. Runs may have other models and other sizes; what they compute is the same.

        with ray_for(3, "cpu"), keeping_workers():
            for lr in (1e-4, 3e-4):
                with Trainer(config_of(lr), reward) as trainer:
                    trainer.fit()

    Only workers of a run that ended well are kept, and only those which give up their engines within half a minute.
    Ray must be up before and stay up until after: its end would end them.
    """
    global _kept
    before, _kept = _kept, _Kept()
    try:
        yield
    finally:
        kept, _kept = _kept, before
        for actor in (actor for actors in kept.idle.values() for actor in actors):
            ray.kill(actor)


def start_workers(kind: type, platform: str, each: Sequence[tuple]) -> list[ActorHandle]:
    """Actors of class ``kind``, one for each tuple of arguments that follow the platform's name.

    One that was kept is taken where it was started by the same arguments, so that its name in messages stays right.
    """
    actor = ray.remote(kind).options(**get_platform(platform).ray_options)
    keys = [(kind, platform, *arguments) for arguments in each]
    if not _kept:
        return [actor.remote(*key[1:]) for key in keys]
    actors = [_kept.idle[key].pop() if _kept.idle.get(key) else None for key in keys]
    _kept.made |= {kept: key for kept, key in zip(actors, keys, strict=True) if kept}
    _make_room(platform, actors.count(None))
    for place, key in enumerate(keys):
        if actors[place] is None:
            actors[place] = actor.remote(*key[1:])
            _kept.made[actors[place]] = key
    return actors


def _make_room(platform: str, count: int) -> None:
    """End the kept workers that have no run where Ray could not place ``count`` new ones beside them: those would wait
    for ever."""
    idle = [(key, actor) for key, actors in _kept.idle.items() for actor in actors]
    needed = Counter()
    for name in [platform] * count + [key[1] for key in _kept.made.values()] + [key[1] for key, _ in idle]:
        needed.update(ray_resources(get_platform(name)))
    have = ray.cluster_resources()
    if any(need > have.get(resource, 0) for resource, need in needed.items()):
        _kept.idle.clear()
        for _, actor in idle:
            ray.kill(actor)


def end_workers(actors: Sequence[ActorHandle], keep: bool) -> None:
    """End actors, or keep them for a later run where ``keeping_workers`` asks for that.

    Args:
        keep: whether their run ended well; after a failure a worker may hang in a collective, or hold half an update.
    """
    closed = _close([actor for actor in actors if keep and _kept and actor in _kept.made])
    for actor in actors:
        key = _kept.made.pop(actor, None) if _kept else None
        if actor in closed:
            _kept.idle.setdefault(key, []).append(actor)
        else:
            ray.kill(actor)


def _close(actors: Sequence[ActorHandle]) -> set[ActorHandle]:
    """Those of the actors that gave up their engines in time."""
    closing = {actor.close.remote(): actor for actor in actors}
    done, _ = ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_S) if closing else ([], [])
    return {closing[reference] for reference in done if _is_fine(reference)}


def _is_fine(reference: Any) -> bool:
    try:
        ray.get(reference)
    except ray.exceptions.RayError:
        return False
    return True
