"""Offloading: optimizer state, and weights that do not learn, wait in the host's memory until they are used.

On a CPU the host's memory is the device's as well. The same copies are made there.
"""

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from engines.megatron.memory.estimate import choose_hosted


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, pinned where a device fetches it."""
    is_pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned).copy_(tensor.detach())


class HostedWeights:
    """Weights of a module that does not learn, on the device within a ``with`` and on the host outside it."""

    def __init__(self, module: torch.nn.Module, device: torch.device):
        self.device = device
        self.kept = [(parameter, copy_to_host(parameter)) for parameter in module.parameters()]
        self._leave_device()

    def __enter__(self) -> None:
        for parameter, kept in self.kept:
            parameter.data = torch.empty_like(kept, device=self.device).copy_(kept, non_blocking=True)

    def __exit__(self, *_) -> None:
        self._leave_device()

    def _leave_device(self) -> None:
        for parameter, kept in self.kept:
            parameter.data = kept


class HostedState:
    """fp32 masters and moments of a share of a rank's numbers, which the host keeps and steps.

    The optimizer's own tensors are on the host, but for the moment in which Megatron hands them their gradients: torch
    refuses a tensor a gradient on another device, so each then is a likeness on the device that takes no memory. A
    step fetches the gradients and is computed on the host. Megatron then copies the masters to the weights, whichever
    device they are on, and a checkpoint holds what it holds without this.

    Megatron-core 0.16.1 has a ``HybridDeviceOptimizer`` for the same end. It takes tensors whose ``is_cuda`` is true
    and no others, so that nothing of it can be run without such a card.

    Args:
        fraction: of the rank's numbers, at least; whole tensors, the largest first.
    """

    def __init__(self, part: DistributedOptimizer, fraction: float):
        parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        chosen = choose_hosted([parameter.numel() for parameter in parameters], fraction)
        self.parameters = [parameters[place] for place in sorted(chosen)]
        self.likenesses = [p.new_empty(1).expand(p.shape) for p in self.parameters]
        self.kept = [copy_to_host(parameter) for parameter in self.parameters]
        self._prepare = part.prepare_grads
        self._return_to_host()
        part.prepare_grads = self.prepare_grads
        part.optimizer.register_step_pre_hook(lambda *_: self._fetch_gradients())
        part.optimizer.register_step_post_hook(lambda *_: self._drop_gradients())

    def prepare_grads(self) -> bool:
        """Megatron's, which assigns each of its gradients."""
        for parameter, likeness in zip(self.parameters, self.likenesses, strict=True):
            parameter.data = likeness
        return self._prepare()

    def _fetch_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        self._drop_gradients()
        self._return_to_host()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = copy_to_host(gradient)

    def _return_to_host(self) -> None:
        for parameter, kept in zip(self.parameters, self.kept, strict=True):
            parameter.data = kept

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
