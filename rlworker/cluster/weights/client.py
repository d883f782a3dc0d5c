"""The rollout workers of vLLM's weight transfer, as a training rank calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from rlworker.cluster.process_state import is_lost
from rlworker.cluster.weights.receiver import Receiver

SETTLE_S = 30.0
"""Seconds in which rollout workers must notice that their sender has given up an update; later workers are ended."""


class EnginesLostError(Exception):
    """Tells that rollout workers were lost in an update, which the others must get again from its begin."""


class TransferClient:
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
            break_off: is called at a failure; the other workers then have ``SETTLE_S`` to answer.

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
                        limit_s = SETTLE_S
        if lost:
            raise EnginesLostError("rollout workers were lost in an update")
        if failure:
            raise failure
