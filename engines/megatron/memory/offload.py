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


class OffloadManager:
    """The parts of an engine on its device (weights, gradients, optimizer state), which can be offloaded and come back.

    Memory is given back storage by storage and taken again under the same tensors. So every view into one of
    Megatron's buffers, of which there are many, is right again without being known here. A gradient does not outlive
    its step: it is given back without a copy.

    Args:
        module: wrapped in Megatron's DistributedDataParallel where it learns. optimizer: None where it does not.
        visits: its weights are on the host anyway, but while it computes.
        base: the manager that moves its frozen weights, which are another engine's too; None where this one does.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer,
        device: torch.device,
        visits: bool = False,
        base: "OffloadManager | None" = None,
    ):
        self._module: Any = module  # a wrapped module has Megatron's buffers
        self._optimizer, self._device, self._visits, self._base = optimizer, device, visits, base
        self._left: dict[str, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}

    def offload(self, parts: Sequence[OffloadPart]) -> None:
        """Move these parts from the device to the host's memory, and free the memory that they had on the device."""
        for name in parts:
            if name not in self._left:
                storages = list(self._list_storages(name))
                copies = [None if name == "gradients" else copy_to_host(_view_bytes(storage)) for storage in storages]
                self._left[name] = [(s, s.nbytes(), copy) for s, copy in zip(storages, copies, strict=True)]
                for storage in storages:
                    storage.resize_(0)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()  # another process cannot use cached blocks

    def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Bring these back onto the device, where they have left it."""
        for storage, size, copy in (each for name in parts for each in self._left.pop(name, ())):
            storage.resize_(size)
            content = _view_bytes(storage)
            content.zero_() if copy is None else content.copy_(copy)

    def require(self, who: str, *parts: OffloadPart) -> None:
        """Raise RuntimeError where one of these is not on the device."""
        if self._base and "weights" in parts:
            self._base.require(who, "weights")
        if missing := [name for name in parts if name in self._left]:
            raise RuntimeError(
                f"engine: {who} was called while {' and '.join(missing)} were offloaded, expected them on the device; "
                "it is another's turn there: call onload first"
            )

    def _list_storages(self, name: str) -> Iterator[torch.UntypedStorage]:
        """List the storages of a holding that are on the device, each once."""
        weights: list[Tensor] = []
        if not self._visits:  # those that learn are views into buffers, the others are frozen
            frozen = () if self._base else self._module.parameters()
            weights = [*(buffer.param_data for buffer in self._list_buffers()), *frozen]
        seen: set[int] = set()
        if name == "optimizer":  # fp32 weights are their own masters
            seen = {tensor.untyped_storage().data_ptr() for tensor in weights}
        tensors = {"weights": lambda: weights, "gradients": self._list_gradients, "optimizer": self._list_state}[name]()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _list_buffers(self) -> list:
        return [*self._module.buffers, *self._module.expert_parallel_buffers] if self._optimizer else []

    def _list_gradients(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in self._list_buffers()]

    def _list_state(self) -> Iterator[Tensor]:
        for part in self._optimizer.chained_optimizers if self._optimizer else ():
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage ``[bytes]`` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
