"""Send weights from the training ranks to every rollout worker by vLLM's weight transfer."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from engines.vllm.transfer import ExportedWeights
from hardware.platform import Platform
from rlworker.cluster.weights.client import SETTLE_S, EnginesLostError, TransferClient
from rlworker.cluster.weights.receiver import Receiver

if TYPE_CHECKING:
    from torch import Tensor


class TransferSender:
    """Sends the weights of a training rank by a group of processes with the rollout workers.

    The group is kept for the next update, and made anew where the workers are others.

    Args:
        platform: the platform.
    """

    def __init__(self, platform: Platform):
        self._platform = platform
        self._receivers: Sequence[Receiver] = ()
        self._engine: Any = None
        self._client: TransferClient | None = None
        self._metadata: list | None = None

    def send(
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
        self.close()
        way, world_size = receivers[0].way, 1 + sum(receiver.devices for receiver in receivers)
        with socket.socket() as free:
            free.bind(("", 0))
            address = ray.util.get_node_ip_address(), free.getsockname()[1]
        largest = max((math.prod(each.shape) * each.dtype.itemsize for each in source.metadata()), default=0)
        info = self._platform.make_trainer_info(way, rank, world_size, address, chunk, largest)
        self._client = TransferClient(receivers, way in self._platform.ways_from_all_ranks)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=source)
        self._client.break_off = self._engine.shutdown
        self._receivers = receivers

    def _give_up(self, error: Exception) -> bool:
        """Leave the group, so that the workers notice; False where workers were lost, else raises their error."""
        client = self._client
        self.close()
        try:
            if client:
                client.wait(SETTLE_S)
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
