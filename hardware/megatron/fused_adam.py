"""AdamW with the interface of Apex's FusedAdam, on torch's multi-tensor operations."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

AT_ONCE = 100_000_000
"""Number of parameter elements that are stepped together: a step holds a copy of their second moments."""

_torch = cast(Any, torch)
"""Torch with its multi-tensor operations, which it leaves out of its types."""


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101).

    The step count is in the parameter group, where Megatron's distributed optimizer looks for it when it saves.

    Args:
        adam_w_mode: whether to decay weights directly; else ``weight_decay * p`` is added to the gradient.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=0))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict, params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        group["step"] += 1
        rows = ((p, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]) for p in params)
        for columns in _slices(cast(Iterable[tuple[Tensor, ...]], rows)):
            self._step_slice(group, *columns)

    def _step_slice(
        self, group: dict, params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]
    ) -> None:
        step, (beta1, beta2), lr, decay = group["step"], group["betas"], group["lr"], group["weight_decay"]
        if decay and self.adam_w_mode:
            _torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = _torch._foreach_add(grads, params, alpha=decay)
        _torch._foreach_lerp_(first, grads, 1 - beta1)
        _torch._foreach_mul_(second, beta2)
        _torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        denominator = _torch._foreach_sqrt(second)
        _torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
        _torch._foreach_add_(denominator, group["eps"])
        _torch._foreach_addcdiv_(params, first, denominator, -lr / (1 - beta1**step))


def _slices(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[list[list[Tensor]]]:
    """Split rows of tensors into runs of at most ``AT_ONCE`` elements each; a larger tensor is split into parts."""
    run: list[tuple[Tensor, ...]] = []
    held = 0
    for row in rows:
        for parts in [row] if row[0].numel() <= AT_ONCE else zip(*(x.view(-1).split(AT_ONCE) for x in row)):
            if held + parts[0].numel() > AT_ONCE:
                yield [list(column) for column in zip(*run)]
                run, held = [], 0
            run.append(parts)
            held += parts[0].numel()
    yield [list(column) for column in zip(*run)]
