"""The rollout workers that take new weights: where they are, and how they load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlworker.cluster.process_state import is_lost
from rlworker.cluster.watch import wait_for

if TYPE_CHECKING:
    from engines.interfaces import RolloutEngine
    from engines.vllm.loop import EngineLoop
    from engines.vllm.update import UpdateLimit
    from engines.weight_sync import WeightBucket


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
