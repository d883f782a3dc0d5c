"""Kernels of an accelerator that torch decomposes on a device it does not know, and memory that kernels take inside."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hardware.megatron.kernel_memory import KernelMemory

_aten: Any = torch.ops.aten
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


class _FlashAttention(torch.autograd.Function):
    """Calls torch's flash attention, forward and backward, by the operators whose shapes are known everywhere."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None):
        output, lse, *settings, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.settings, ctx.is_causal, ctx.scale = settings, is_causal, scale
        return output

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        query_bounds, key_bounds, *longest, seed, offset = ctx.settings
        found = _aten._scaled_dot_product_flash_attention_backward(
            gradients[0],
            *ctx.saved_tensors,
            query_bounds,
            key_bounds,
            *longest,
            0.0,
            ctx.is_causal,
            seed,
            offset,
            scale=ctx.scale,
        )
        return *found, None, None


def fuse_kernels(has_norms: bool) -> torch.library.Library:
    """Register attention in bfloat16 without a mask, the derivative of SiLU and, with ``has_norms``, ``rms_norm`` as
    single operators of the device, for as long as the library is kept."""
    library = torch.library.Library("aten", "IMPL")

    def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None):
        return _FusedNorm.apply(x, weight)

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is None and query.dtype == torch.bfloat16 and not enable_gqa:
            return _FlashAttention.apply(query, key, value, is_causal, scale)
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **settings)[
            0
        ]

    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
    library.impl("silu_backward", lambda gradient, x: torch.empty_like(x), "AutogradPrivateUse1")
    if has_norms:
        library.impl("rms_norm", rms_norm, "AutogradPrivateUse1")
    return library


def count_flops(operator: Any, args: tuple, kwargs: dict[str, Any], found: Any) -> int:
    """Count an operator's FLOPs as torch's FlopCounterMode does, and those of products that it leaves out: grouped
    ones, whose rows on the left are multiplied by a group's matrix each, and those added in place.

    Args:
        found: outputs of the operator.
    """
    place = {_aten._grouped_mm: 0, _aten.addmm_: 1}.get(operator.overloadpacket)  # of the left factor
    if place is not None:
        left, right = args[place : place + 2]
        return 2 * left.numel() * right.shape[-1]
    count = flop_registry.get(operator.overloadpacket)
    return count(*args, **kwargs, out_val=found) if count else 0


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
