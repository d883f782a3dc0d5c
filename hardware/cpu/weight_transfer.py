"""vLLM's weight transfer over gloo: the protocol of its engine for GPUs, with a process group of the host's.

vLLM 0.32 brings no engine for a CPU. The classes here inherit the steps, the messages and the cut into chunks, and
replace the collective.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # as documented
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

_TIMEOUT = timedelta(minutes=15)
"""Longest wait for the other side; a process that stands still is ended earlier, which closes its connections."""
_LOOK = timedelta(seconds=1)


class _Group:
    """The sender, rank 0, and vLLM's workers, to which it sends in the background.

    Work that has begun keeps the connections open, even of a group that is gone: all of it is held here, so that
    ``destroy`` lets the other side hear of a failure.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self._group: Any = ProcessGroupGloo(PrefixStore("group", store), rank, size, _TIMEOUT)
        self._begun: deque[Any] = deque()

    def begin(self, data: Tensor) -> None:
        """Begin to send, or to receive, ``[bytes]``."""
        options = BroadcastOptions()
        options.rootRank = 0
        self._begun.append(self._group.broadcast([data], options))

    def wait(self, left: int = 0) -> None:
        """Wait until at most so many tensors are on their way."""
        while len(self._begun) > left:
            self._begun.popleft().wait()

    def destroy(self) -> None:
        """Close the connections; the engines call it when they shut down."""
        self._group = None
        self._begun.clear()


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):
    """Settings of the sender's side."""

    backend: ClassVar[str] = "gloo"


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """Receives weights in a vLLM worker."""

    model: Any
    model_update_group: Any

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the sender's group, and leave the group of an earlier sender."""
        self.shutdown()
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        assert init_info.master_address and init_info.master_port
        store = TCPStore(init_info.master_address, init_info.master_port, None, False, _TIMEOUT)
        rank = init_info.rank_offset + self.parallel_config.rank
        store.set(f"here/{rank}", "")
        self.model_update_group = _Group(store, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights; a CPU has no stream to wait for afterwards. A failure closes the connections, so that the
        sender hears of it."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.shutdown()
            raise

    def receive_weights(self, update_info: Any) -> None:
        """Receive all weights; while a chunk is loaded the next one is on its way."""
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        rows = zip(update_info.names, update_info.shapes, dtypes, strict=True)
        arriving: tuple[Tensor, list] | None = None
        for chunk in (*_cut_chunks(rows, self.packed_buffer_size_bytes), None):
            loading = arriving
            if chunk:
                arriving = torch.empty(sum(size for *_, size in chunk), dtype=torch.uint8), chunk
                self.model_update_group.begin(arriving[0])
            if loading:
                self.model_update_group.wait(left=1 if chunk else 0)
                packed, whole = loading
                names, shapes, kinds, sizes = (list(column) for column in zip(*whole, strict=True))
                self.model.load_weights(unpack_tensor(packed, names, shapes, kinds, sizes))


class GlooTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):
    """Sends weights from a training rank."""

    init_info_cls = GlooTrainerInitInfo
    model_update_group: Any

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        """Make the engine of a rank; the sender waits until every vLLM worker has joined its group.

        Raises:
            Exception: the error that ``client`` raised when it asked the workers to join.
        """
        assert source is not None
        size = init_info.packed_buffer_size_bytes
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, packed_buffer_size_bytes=size)
        if not engine.is_sender:
            return engine
        address, world = (init_info.master_address, init_info.master_port), init_info.world_size
        store = TCPStore(*address, None, True, _TIMEOUT, False)
        host, port = address
        invitation = NCCLWeightTransferInitInfo(
            master_address=host, master_port=port, rank_offset=1, world_size=world, packed_buffer_size_bytes=size
        )
        asking = ThreadPoolExecutor(max_workers=1)
        asked = asking.submit(client.init_weight_transfer_engine, worker_init_payload(invitation))
        _wait_for_workers(store, world, asked)
        engine.model_update_group = _Group(store, 0, world)
        asked.result()
        asking.shutdown()
        return engine

    def _broadcast(self, source, meta) -> None:
        if not self.is_sender:
            for _ in source:
                pass
            return
        pairs = self._checked_iter(source, meta)
        while chunk := pack_tensors(pairs, lambda pair: pair[1], self.packed_buffer_size_bytes):
            self.model_update_group.begin(chunk.packed_tensor)
            self.model_update_group.wait(left=1)
        self.model_update_group.wait()


WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerWeightTransferEngine)


def _wait_for_workers(store: Store, world_size: int, asked: Future) -> None:
    """Wait until every worker has come, or raise the error of the call that asked them to come."""
    keys = [f"here/{rank}" for rank in range(1, world_size)]
    while not asked.done():
        try:
            return store.wait(keys, _LOOK)
        except DistStoreError:
            continue
    asked.result()


def _cut_chunks(rows: Iterable[tuple[str, list[int], torch.dtype]], most: int) -> Iterator[list[tuple]]:
    """Cut names, shapes and dtypes into the chunks that ``pack_tensors`` makes; adds the bytes of each tensor."""
    chunk, total = [], 0
    for name, shape, dtype in rows:
        size = torch.Size(shape).numel() * dtype.itemsize
        chunk.append((name, shape, dtype, size))
        total += size
        if total > most:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk
