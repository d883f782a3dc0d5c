"""vLLM's weight transfer on NVIDIA's devices: the sender's settings of its engines. Untested on a device."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo


@dataclass
class FixedIPCTrainerInitInfo(IPCTrainerInitInfo):
    """Settings of a sender by handles of device memory, in a process whose segments can grow."""

    backend: ClassVar[str] = "ipc in fixed segments"


class FixedIPCTrainerWeightTransferEngine(IPCTrainerWeightTransferEngine):
    """Sends weights by handles of a buffer that lies in a segment of fixed size, which other processes can open."""

    init_info_cls = FixedIPCTrainerInitInfo

    def send_weights(self) -> None:
        """Send the weights; segments that are allocated meanwhile cannot grow."""
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        try:
            super().send_weights()
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


WeightTransferTrainerFactory.register_engine("ipc in fixed segments", FixedIPCTrainerWeightTransferEngine)


def make_trainer_info(way: str, rank: int, world_size: int, address: tuple[str, int], chunk: int, largest: int) -> Any:
    """Make vLLM's settings of a sender, as ``Platform.make_trainer_info`` does."""
    if way == "ipc":  # one buffer, which must hold the largest tensor
        return FixedIPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(chunk, largest))
    return NCCLTrainerInitInfo(*address, world_size, rank=rank, packed_buffer_size_bytes=chunk)
