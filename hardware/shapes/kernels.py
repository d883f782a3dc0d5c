"""Kernels of an accelerator that torch decomposes on a device it does not know, and memory that kernels take inside."""

from typing import Any

import torch
from torch import Tensor

from hardware.platform import KernelMemory

_BACKWARD = "torch_attn::_varlen_attn_backward"


class _FusedNorm(torch.autograd.Function):
    """Gives the shapes of torch's fused RMS norm, which keeps its input and a factor of each row in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None):
        factor = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, factor, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None


def fuse_norms() -> torch.library.Library:
    """Make ``rms_norm`` one operator on torch's private device, for as long as the library is kept."""
    library = torch.library.Library("aten", "IMPL")

    def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None):
        return _FusedNorm.apply(x, weight)

    library.impl("rms_norm", rms_norm, "AutogradPrivateUse1")
    return library


def count_inside(operator: Any, args: tuple, memory: KernelMemory) -> int:
    """Count the bytes that a kernel allocates and frees within a call, beside its outputs.

    Args:
        args: of ``varlen_attn``'s backward: the gradient, queries ``[n, heads, d]``, keys, values, output, lse, bounds.
    """
    if operator.name() != _BACKWARD:
        return 0
    query, key, sequences = args[1], args[2], len(args[6]) - 1
    heads = query.shape[1], key.shape[1], query.shape[2]
    return int(memory.count_backward_bytes(len(query), len(key), sequences, *heads, query.element_size()))
