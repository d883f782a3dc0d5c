"""Offloading: weights, gradients and optimizer state move to the host's memory while an engine does not use them.

On a CPU the host's memory is the device's too, and the same copies are made.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor

from engines.batch.balance import choose_largest
from engines.interfaces import OffloadPart


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, pinned where a device reads it."""
    is_pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned).copy_(tensor.detach())


class OffloadedWeights:
    """Weights of a module that does not learn, on the device within a ``with`` and on the host outside it.

    Storages are given back and taken again under the same tensors: torch (2.13) lets no tensor of a device of
    ``PrivateUse1``, such as an NPU, become one of the host by ``.data`` (pytorch#196975).
    """

    def __init__(self, module: torch.nn.Module):
        storages = {each.data_ptr(): each for each in (p.untyped_storage() for p in module.parameters())}
        self.kept = [(storage, copy_to_host(_view_bytes(storage))) for storage in storages.values()]
        self._leave_device()

    def __enter__(self) -> None:
        for storage, kept in self.kept:
            storage.resize_(kept.nbytes)
            _view_bytes(storage).copy_(kept, non_blocking=True)

    def __exit__(self, *_) -> None:
        self._leave_device()

    def _leave_device(self) -> None:
        for storage, _ in self.kept:
            storage.resize_(0)


class OffloadedOptimizer:
    """Offloaded optimizer state: fp32 masters and moments of a share of a rank's parameters, stepped on the host.

    Megatron's lists have tensors of the host, except while it assigns and clips their gradients. Torch refuses a
    gradient on another device than its tensor, so for that time placeholders stand there: tensors of the device that
    take no memory. A step copies the gradients to the host and computes there. Megatron then copies the masters to the
    weights on their device. A checkpoint is the same as without offloading.

    Megatron-core 0.16.1 has ``HybridDeviceOptimizer`` for this purpose. It accepts only tensors with ``is_cuda``, so it
    cannot run without such a card.

    Args:
        fraction: of the rank's numbers, at least; whole tensors, the largest first.
    """

    def __init__(self, part: DistributedOptimizer, fraction: float):
        parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        chosen = choose_largest([parameter.numel() for parameter in parameters], fraction)
        taken = [parameters[place] for place in sorted(chosen)]
        self.on_host = [copy_to_host(parameter) for parameter in taken]
        self.placeholders = [parameter.new_empty(1).expand(parameter.shape) for parameter in taken]
        for others in (self.on_host, self.placeholders):
            for parameter, other in zip(taken, others, strict=True):
                copy_tensor_model_parallel_attributes(other, parameter)
                vars(other).update({"shared": parameter.shared} if hasattr(parameter, "shared") else {})
        self._part, self._prepare = part, part.prepare_grads
        replaced = self._exchange(taken, self.on_host)
        for weight in chain(*part.model_float16_groups):  # a handle that would keep the master on the device
            weight.main_param = replaced.get(id(weight.main_param), weight.main_param)
        part.prepare_grads = self.prepare_grads
        part.optimizer.register_step_pre_hook(lambda *_: self._fetch_gradients())
        part.optimizer.register_step_post_hook(lambda *_: part.optimizer.zero_grad())

    def prepare_grads(self) -> bool:
        """Megatron's, which assigns each of its gradients."""
        self._exchange(self.on_host, self.placeholders)
        return self._prepare()

    def _fetch_gradients(self) -> None:
        self._exchange(self.placeholders, self.on_host)
        for host, placeholder in zip(self.on_host, self.placeholders, strict=True):
            host.grad, placeholder.grad = copy_to_host(placeholder.grad), None

    def _exchange(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[int, Tensor]:
        """Put other tensors into Megatron's lists; returns id of the earlier tensor -> tensor."""
        replaced = {id(one): other for one, other in zip(before, after, strict=True)}
        groups = [group["params"] for group in self._part.optimizer.param_groups]
        for tensors in chain(groups, self._part.shard_fp32_groups, self._part.shard_fp32_from_float16_groups):
            tensors[:] = [replaced.get(id(each), each) for each in tensors]
        return replaced


Left = list[tuple[torch.UntypedStorage, int, Tensor | None]]
"""Storages of a part that has left its device: each with its size, and its content on the host."""


def move_to_host(storages: Sequence[torch.UntypedStorage], keeps: bool) -> Left:
    """Move storages from the device to the host's memory, and free the memory that they had on the device.

    Memory is given back storage by storage and taken again under the same tensors. So every view into one of
    Megatron's buffers, of which there are many, is right again without being known here.

    Args:
        keeps: whether their content comes back; a gradient does not outlive its step.
    """
    copies = [copy_to_host(_view_bytes(storage)) if keeps else None for storage in storages]
    left = [(storage, storage.nbytes(), copy) for storage, copy in zip(storages, copies, strict=True)]
    for storage in storages:
        storage.resize_(0)
    return left


def empty_cache(device: torch.device) -> None:
    """Give back the blocks that torch keeps of a device, which no other process can use."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def move_to_device(left: Left) -> None:
    """Bring a part back onto the device that it has left."""
    for storage, size, copy in left:
        storage.resize_(size)
        content = _view_bytes(storage)
        content.zero_() if copy is None else content.copy_(copy)


def list_storages(
    name: OffloadPart,
    module: Any,
    optimizer: Any,
    device: torch.device,
    *,
    moves_weights: bool,
    moves_frozen: bool,
) -> list[torch.UntypedStorage]:
    """List the storages of an engine's part that are on the device, each once.

    Args:
        module: a wrapped module has Megatron's buffers. optimizer: None where it does not learn.
        moves_weights, moves_frozen: whether the engine moves its weights, and those of them that do not learn.
    """
    buffers = [*module.buffers, *module.expert_parallel_buffers] if optimizer else []
    weights: list[Tensor] = []
    if moves_weights:  # those that learn are views into buffers, the others are frozen
        weights = [*(buffer.param_data for buffer in buffers), *(module.parameters() if moves_frozen else ())]
    seen: set[int] = set()
    if name == "optimizer":  # fp32 weights are their own masters
        seen = {tensor.untyped_storage().data_ptr() for tensor in weights}
        tensors = _list_state(optimizer)
    else:
        tensors = weights if name == "weights" else [buffer.grad_data for buffer in buffers]
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device == device and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found.append(storage)
    return found


def _list_state(optimizer: Any) -> Iterator[Tensor]:
    for part in optimizer.chained_optimizers if optimizer else ():
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage ``[bytes]`` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
