"""Send weights from the training ranks to every rollout worker: in buckets over Ray, or by vLLM's weight transfer."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from engines.weight_sync import pack_buckets
from hardware.platform import HOST, Platform
from rlworker.cluster.process_state import is_lost
from rlworker.cluster.watch import wait_for

if TYPE_CHECKING:
    from torch import Tensor

    from engines.interfaces import RolloutEngine, TrainEngine
    from engines.vllm.loop import EngineLoop
    from engines.vllm.transfer import ExportedWeights
    from engines.vllm.update import UpdateLimit
    from engines.weight_digest import DigestPlan
    from engines.weight_sync import WeightBucket

BUCKET_BYTES = 64 * 2**20
"""Most bytes of a bucket, in which weights travel to few rollout engines. At most two buckets are on their way at a
time."""
_SETTLE_S = 30.0
"""Seconds in which rollout workers must notice that their sender has given up an update; later workers are ended."""


@dataclass(frozen=True)
class Receiver:
    """A rollout worker that new weights are sent to.

    Attributes:
        worker: Ray's handle. way: way of its weights, of ``Platform.find_weight_ways``. devices: number of its devices.
    """

    worker: ActorHandle
    way: str
    devices: int


class WeightReceiver:
    """Methods of a rollout worker that load new weights. Sampling pauses from the begin of an update to its end."""

    loop: EngineLoop
    engine: RolloutEngine
    devices: int
    _update_limit: UpdateLimit
    _open_at_update: int
    _note_work: Callable[[], None]

    def describe_receiver(self) -> tuple[str, int]:
        """Return the way of this engine's weights, and the number of its devices."""
        return self.engine.weight_way, self.devices

    def load_weights(self, bucket: WeightBucket, version: int, last: bool) -> None:
        """Load a bucket of new weights. Sampling pauses from the first bucket to the last, as weights are mixed."""
        if bucket.first:
            self._pause()
        self.loop.call(self.engine.load_weights, bucket, version, last)
        self._update_limit.note_bucket(version, last)
        if last:
            self.loop.resume()

    def begin_transfer(self, version: int) -> None:
        """Begin an update by vLLM's weight transfer, and pause sampling until its end."""
        self._pause()
        self.loop.call(self.engine.begin_transfer, version)
        self._update_limit.note_bucket(version, False)

    def transfer(self, step: str, info: dict[str, Any]) -> None:
        """Take a step of vLLM's weight transfer, by the name of its method."""
        self.loop.call(self.engine.transfer, step, info)

    def end_transfer(self, version: int, checksums: Mapping[str, int]) -> None:
        """End an update by vLLM's weight transfer, if all weights came as they were sent."""
        self.loop.call(self.engine.end_transfer, version, checksums)
        self._update_limit.note_bucket(version, True)
        self.loop.resume()

    def _pause(self) -> None:
        self._note_work()
        self.loop.pause()
        self._open_at_update = self.loop.count_open()


def find_receivers(rollouts: Sequence[ActorHandle]) -> list[Receiver]:
    """Ask rollout workers for the way of their weights; those that are lost are left out."""
    found = []
    for worker, call in [(worker, worker.describe_receiver.remote()) for worker in rollouts]:
        try:
            ((way, devices),) = wait_for([call])
        except RayError as error:
            if not is_lost(error):
                raise
        else:
            found.append(Receiver(worker, way, devices))
    return found


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


class EnginesLostError(Exception):
    """Tells that rollout workers were lost in an update, which the others must get again from its begin."""


class _Client:
    """The rollout workers of a transfer, as vLLM's sender calls them (``VLLMWeightSyncClient``).

    Args:
        receivers: the workers.
        defers: whether a failure is kept in ``failure`` and nothing more is called, where the sender has to go on with
            the other training ranks.

    Attributes:
        version: version of the weights. checksums: name -> ``checksum`` of each tensor sent in this update.
        break_off: leaves the group of a transfer, from any thread, so that a sender that waits in it goes on.
    """

    def __init__(self, receivers: Sequence[Receiver], defers: bool):
        self._receivers, self._defers = receivers, defers
        self.version, self.checksums = 0, {}
        self.failure: Exception | None = None
        self.break_off: Callable[[], None] | None = None
        self._calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all workers join a group, each with as many ranks as it has devices."""
        arguments, offset = [], init_info.get("rank_offset", 0)
        for receiver in self._receivers:
            own = {"rank_offset": offset} if "rank_offset" in init_info else {}
            arguments.append(("init_weight_transfer_engine", init_info | own))
            offset += receiver.devices
        self._call("transfer", arguments)

    def start_weight_update(self) -> None:
        self._call("begin_transfer", [(self.version,)] * len(self._receivers))

    def update_weights(self, update_info: Any) -> None:
        """Have all workers receive weights; the first that fails breaks off the transfer, on which the sender waits."""
        self._call("transfer", [("update_weights", ray.put(update_info))] * len(self._receivers), self.break_off)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update. A worker that is lost here needs no repetition: whoever asks it next hears so."""
        before = self.failure
        with suppress(EnginesLostError):
            self._call("end_transfer", [(self.version, self.checksums)] * len(self._receivers))
        if isinstance(self.failure, EnginesLostError):
            self.failure = before

    def _call(self, method: str, arguments: Sequence[tuple], break_off: Callable[[], None] | None = None) -> None:
        if self.failure:
            return
        calls = zip(self._receivers, arguments, strict=True)
        self._calls = [getattr(each.worker, method).remote(*args) for each, args in calls]
        try:
            self.wait(break_off=break_off)
        except (EnginesLostError, RayError) as error:
            if not self._defers:
                raise
            self.failure = error

    def wait(self, limit_s: float | None = None, break_off: Callable[[], None] | None = None) -> None:
        """Wait for the open calls, and end workers if none of them answers within the limit.

        Args:
            break_off: is called at a failure; the other workers then have ``_SETTLE_S`` to answer.

        Raises:
            EnginesLostError: a worker is lost. RayError: the first error of another kind.
        """
        lost, failure, left = False, None, dict(zip(self._calls, self._receivers, strict=False))
        while left:
            answered, _ = ray.wait(list(left), timeout=limit_s)
            for call in answered or list(left):
                receiver = left.pop(call)
                if not answered:
                    ray.kill(receiver.worker)
                    lost = True
                    continue
                try:
                    ray.get(call)
                except RayError as error:
                    lost, failure = lost or is_lost(error), failure or error
                    if break_off:
                        break_off()
                        limit_s = _SETTLE_S
        if lost:
            raise EnginesLostError("rollout workers were lost in an update")
        if failure:
            raise failure


class WeightSender:
    """Sends the weights of a training rank to rollout workers, by the way on which they take them.

    A group of processes with the workers is kept for the next update, and made anew where the workers are others.

    Args:
        platform: the platform.
    """

    def __init__(self, platform: Platform):
        self._platform = platform
        self._receivers: Sequence[Receiver] = ()
        self._engine: Any = None
        self._client: _Client | None = None
        self._metadata: list | None = None

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
        leads = engine.is_leader and not engine.dp_rank
        sent = self._transfer(export, receivers, version, max_bytes, 0 if leads else 1)
        return (digests if leads else {}) if sent else None

    def _transfer(
        self,
        export: Callable[[], Iterator[tuple[str, Tensor]]],
        receivers: Sequence[Receiver],
        version: int,
        chunk: int,
        rank: int,
    ) -> bool:
        """Send what ``export`` yields by vLLM's weight transfer; False where rollout workers were lost.

        Args:
            export: a collective, which is run to its end also after a failure.
            chunk: bytes that travel at a time. rank: 0 on the rank that leads.
        """
        from engines.vllm.transfer import ExportedWeights

        source = ExportedWeights(export, self._metadata)
        self._metadata = source.metadata()  # before anything can fail on one rank alone
        try:
            if self._receivers != receivers:
                self._open(source, receivers, chunk, rank)
            assert self._client
            self._engine.source = source
            self._client.version, self._client.checksums, self._client.failure = version, source.checksums, None
            self._engine.send_weights()
            if self._client.failure:
                raise self._client.failure
            return True
        except Exception as error:
            source.drain()  # in which the other ranks are still to meet this one
            return self._give_up(error)

    def _open(self, source: ExportedWeights, receivers: Sequence[Receiver], chunk: int, rank: int) -> None:
        """Form a group with the receivers."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self.close()
        way, world_size = receivers[0].way, 1 + sum(receiver.devices for receiver in receivers)
        with socket.socket() as free:
            free.bind(("", 0))
            address = ray.util.get_node_ip_address(), free.getsockname()[1]
        largest = max((math.prod(each.shape) * each.dtype.itemsize for each in source.metadata()), default=0)
        info = self._platform.make_trainer_info(way, rank, world_size, address, chunk, largest)
        self._client = _Client(receivers, way in self._platform.ways_from_all_ranks)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=source)
        self._client.break_off = self._engine.shutdown
        self._receivers = receivers

    def _give_up(self, error: Exception) -> bool:
        """Leave the group, so that the workers notice; False where workers were lost, else raises their error."""
        client = self._client
        self.close()
        try:
            if client:
                client.wait(_SETTLE_S)
        except EnginesLostError:
            return False
        if isinstance(error, EnginesLostError):
            return False
        raise error

    def close(self) -> None:
        """Leave the group."""
        if self._engine:
            self._engine.shutdown()
        self._engine, self._client, self._receivers = None, None, ()
