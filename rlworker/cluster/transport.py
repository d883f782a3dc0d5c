"""Send weights over Ray, from the training rank that gathers them to every rollout worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlworker.cluster.process_state import is_lost

if TYPE_CHECKING:
    from engines.weight_sync import WeightBucket

BUCKET_BYTES = 64 * 2**20
"""Most bytes of a bucket, in which weights travel to few rollout engines. At most two buckets are on their way at a
time."""
_ENGINES, _MOST_TIMES = 16, 8
"""From how many engines on a bucket is larger, and by how much at most."""


def choose_bucket_bytes(engines: int) -> int:
    """Choose the most bytes of a bucket that so many engines load.

    The sender makes a call for each bucket and engine. So buckets grow with the engines, up to half a GiB.
    """
    return BUCKET_BYTES * max(1, min(engines // _ENGINES, _MOST_TIMES))


def send_buckets(buckets: Iterable[tuple[WeightBucket, bool]], rollouts: Sequence[ActorHandle], version: int) -> None:
    """Send every bucket to every rollout worker, which loads it while the next bucket is gathered, packed and sent.

    At most two buckets are on their way. All buckets are gathered even after a worker failed: gathering is a
    collective, in which the other ranks would wait for this one. A worker that dies gets no further buckets.

    Args:
        buckets: ``(bucket, is_last)``, from ``pack_buckets``.
        rollouts: Ray's handles of the workers. version: version of the weights.

    Raises:
        RayError: the first error that a rollout worker raised, after which nothing more was sent.
    """
    alive, failure, loading = dict(enumerate(rollouts)), None, {}
    for bucket, last in buckets:
        if failure:
            continue
        reference, before = ray.put(bucket), loading
        # Called before the one before is loaded: its bytes are then on their way to other nodes meanwhile.
        loading = {index: each.load_weights.remote(reference, version, last) for index, each in alive.items()}
        failure = _wait(before, alive)
    if failure := failure or _wait(loading, alive):
        raise failure


def _wait(loading: dict[int, Any], alive: dict[int, ActorHandle]) -> RayError | None:
    """Wait for workers to have loaded a bucket, and drop those that died; returns the first failure of another kind."""
    for index, call in loading.items():
        try:
            ray.get(call)
        except RayError as error:
            if not is_lost(error):
                return error
            alive.pop(index, None)  # whoever asks it next hears so
    return None
