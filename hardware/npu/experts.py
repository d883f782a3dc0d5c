"""The experts of a rank on an NPU, multiplied by ``npu_grouped_matmul``.

torch-npu 2.10.0.post4 has no kernel for torch's ``grouped_mm``, which then loops over the experts and reads their ends
on the host. Nor has its own operator a derivative there, so both gradients are calls of it.
"""

import torch
from torch import Tensor

from hardware.megatron.experts import GroupedExperts
from hardware.npu.limits import MAX_GROUPED_WIDTH, MAX_GROUPS


class NpuGroupedExperts(GroupedExperts):
    """``GroupedExperts`` computed by ``npu_grouped_matmul``, and by torch where the operator does not take a call."""

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        # Of no rows the operator computes nothing, and leaves the gradient of the weights as the memory was.
        if not len(x) or len(weight) > MAX_GROUPS or max(weight.shape[1:]) > MAX_GROUPED_WIDTH:
            return GroupedExperts.multiply(x, weight, ends)
        return _Product.apply(x, weight, ends.long())


class _Product(torch.autograd.Function):
    """Multiplies rows as ``GroupedExperts.multiply`` does."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _multiply(x, weight.transpose(1, 2), ends, group_type=0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad, (needs_x, needs_weight, _) = grad.contiguous(), ctx.needs_input_grad
        x_grad = _multiply(grad, weight, ends, group_type=0) if needs_x else None
        # The operator takes the transposed gradient as a view of this kind alone, and refuses a copy.
        weight_grad = _multiply(grad.T, x, ends, group_type=2) if needs_weight else None
        return x_grad, weight_grad, None


def _multiply(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    """Multiply groups by the operator.

    Args:
        x: ``[n, k]``. weight: ``[groups, k, o]``, and ``[k, o]`` if k is grouped. ends: ``[groups]`` int64.
        group_type: 0 if n is grouped, which makes ``[n, o]``; 2 if k is, which makes ``[groups, n, o]``.
    """
    (found,) = torch.ops.npu.npu_grouped_matmul([x], [weight], group_list=ends, split_item=3, group_type=group_type)
    return found
