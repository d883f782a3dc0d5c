"""Weights on their way over Ray, from the training rank that gathers them to every rollout worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

if TYPE_CHECKING:
    from engines.weight_sync import WeightBucket


def send_buckets(buckets: Iterable[tuple[WeightBucket, bool]], rollouts: list[ActorHandle], version: int) -> None:
    """Send every bucket to every rollout worker, each of which loads it while the next is gathered, packed and sent.

    No more than two buckets are on their way. All of them are taken even after a worker failed: gathering them is a
    collective, in which the other ranks would wait for this one.

    Args:
        buckets: ``(bucket, is_last)``, as ``pack_buckets`` makes them.

    Raises:
        RayError: the first failure of a rollout worker, after which no more was sent.
    """
    failure, loading = None, []
    for bucket, last in buckets:
        if failure:
            continue
        reference, before = ray.put(bucket), loading
        # Called before the one before is loaded: its bytes are then on their way to other nodes meanwhile.
        loading = [rollout.load_weights.remote(reference, version, last) for rollout in rollouts]
        failure = _wait(before)
    if failure := failure or _wait(loading):
        raise failure


def _wait(loading: list[Any]) -> RayError | None:
    """Wait for workers to have loaded a bucket; returns the first failure."""
    try:
        ray.get(loading)
    except RayError as error:
        return error
    return None
