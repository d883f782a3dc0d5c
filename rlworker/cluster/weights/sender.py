"""Send weights from the training ranks to every rollout worker: in buckets over Ray, or by vLLM's weight transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from engines.weight_sync import pack_buckets
from hardware.platform import HOST, Platform
from rlworker.cluster.process_state import is_lost
from rlworker.cluster.weights.receiver import Receiver

if TYPE_CHECKING:
    from torch import Tensor

    from engines.interfaces import TrainEngine
    from engines.weight_digest import DigestPlan
    from engines.weight_sync import WeightBucket
    from rlworker.cluster.weights.transfer import TransferSender

BUCKET_BYTES = 64 * 2**20
"""Most bytes of a bucket, in which weights travel to few rollout engines. At most two buckets are on their way at a
time."""


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


class WeightSender:
    """Sends the weights of a training rank to rollout workers, by the way on which they take them.

    Args:
        platform: the platform.
    """

    def __init__(self, platform: Platform):
        self._platform = platform
        self._transfer: TransferSender | None = None

    def sync(
        self, engine: TrainEngine, receivers: Sequence[Receiver], version: int, max_bytes: int, plan: DigestPlan | None
    ) -> dict[str, int] | None:
        """Send an engine's weights as ``version``. Every rank of the engine must call it.

        Args:
            max_bytes: most bytes of a bucket, and bytes of a chunk of vLLM's weight transfer.

        Returns:
            the digests by ``plan`` on the rank that leads, tensor -> digest; None there where workers were lost on the
                way, and all ranks must send to the others again.

        Raises:
            RayError: the first error that a rollout worker raised.
        """
        digests, way = {}, receivers[0].way if receivers else HOST

        def export() -> Iterator[tuple[str, Tensor]]:
            weights = engine.export_weights(way in self._platform.ways_from_all_ranks)
            return plan.digest(weights, digests) if plan else weights

        if way == HOST:
            send_buckets(pack_buckets(export(), max_bytes), [each.worker for each in receivers], version)
            return digests
        if not self._transfer:
            from rlworker.cluster.weights.transfer import TransferSender  # buckets need nothing of it

            self._transfer = TransferSender(self._platform)
        leads = engine.is_leader and not engine.dp_rank
        sent = self._transfer.send(export, receivers, version, max_bytes, 0 if leads else 1)
        return (digests if leads else {}) if sent else None

    def close(self) -> None:
        """Leave the group of a transfer."""
        if self._transfer:
            self._transfer.close()
