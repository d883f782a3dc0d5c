"""Low-rank adapters (LoRA, arXiv:2106.09685) of Megatron's linear layers, cut over ranks as the layer is."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from hardware.megatron.layers import NormFromOne, RMSNorm
from hardware.megatron.marks import mark_experts, mark_sequence_parallel

_REBUILD = "rebuild"
"""Attribute of a tensor: a function, and the tensor of which it makes this one again."""


class LinearAdapter(torch.nn.Module):
    """Adds ``s B A x`` to the output ``W x`` of a linear layer ``[out, in]``.

    The layer may be several of the model's in one, such as queries, keys and values, each with an A of its own: ``a``
    ``[targets * rank, in]`` has one below the other. ``b`` ``[out, rank]`` has the rows of B in the layer's order.

    Ranks that have rows of the layer have the same of ``b``, and each makes the ``rank`` numbers of its own tokens from
    the whole of ``a``. Ranks that have columns of the layer have the same of ``a``, and each makes the output of its
    own tokens from the whole of ``b``. In between ranks exchange ``rank`` numbers of a token, and never its states.

    Args:
        layer: the layer, to whose output the sum is added from here on. One of torch is whole on every rank, and each
            has inputs of its own.
        config: Megatron's.
        owners: ``[out]``, for each row of the layer on this rank the target that it is of; -1 for none.
        targets: number of targets. scale: the factor s.
    """

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear | torch.nn.Linear,
        config: Any,
        owners: Tensor,
        targets: int,
        rank: int,
        scale: float,
    ):
        super().__init__()
        self.scale, self.enabled, self.splits_input = scale, True, isinstance(layer, RowParallelLinear)
        self.is_whole = isinstance(layer, torch.nn.Linear)
        self.sequence_parallel = not self.is_whole and cast(Any, layer).sequence_parallel
        weight = cast(Tensor, layer.weight)
        out, columns = weight.shape
        self.a, self.b = (
            torch.nn.Parameter(weight.new_zeros(shape)) for shape in ((targets * rank, columns), (out, rank))
        )
        whole, cut, axis = (self.b, self.a, 1) if self.splits_input else (self.a, self.b, 0)
        mark_sequence_parallel([whole, cut] if self.is_whole else [whole], config)
        set_tensor_model_parallel_attributes(whole, False, -1, 1)
        set_tensor_model_parallel_attributes(cut, not self.is_whole, -1 if self.is_whole else axis, 1)
        is_own = owners[:, None] == torch.arange(targets)
        self.own: Tensor | None  # [out, targets], 1 where a row is of a target; None where all are of the only one
        self.register_buffer("own", None if is_own.all() else is_own.to(self.b), persistent=False)
        layer.adapter = self
        layer.register_forward_pre_hook(_lay_out)
        layer.register_forward_hook(_add)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute ``y + s B A x`` of the layer's input ``x`` ``[s, b, in]`` and its output ``y`` ``[s, b, out]``.

        ``y`` is changed in place.
        """
        rebuild, source = getattr(x, _REBUILD, (None, x))
        x = _Down.apply(x, self.a, source, rebuild)
        if self.sequence_parallel:
            x = (
                reduce_scatter_to_sequence_parallel_region(x)
                if self.splits_input
                else gather_from_sequence_parallel_region(x)
            )
        return _Up.apply(y, x, self.spread(), self.scale, not self.splits_input and not self.is_whole)

    def spread(self) -> Tensor:
        """Return B ``[out, targets * rank]`` for the whole of A: a row has zeros in the columns of other targets."""
        return self.b if self.own is None else (self.own[:, :, None] * self.b[:, None]).flatten(1)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return ``W + s B A`` of this rank's part of the layer, computed in fp32 and rounded to W's type once."""
        return weight.float().addmm(self.spread().float(), self.a.float(), alpha=self.scale).to(weight.dtype)


class GroupedAdapter(torch.nn.Module):
    """Adds ``s B x A`` of each row's expert to products with a weight of a rank's experts, ``[experts, ..., in]``.

    Args:
        experts: the ``GroupedExperts``. weight: one of its two.
    """

    def __init__(self, experts: Any, weight: Tensor, rank: int, scale: float):
        super().__init__()
        self.scale, self.enabled, (count, *rows, columns) = scale, True, weight.shape
        self.a, self.b = (
            torch.nn.Parameter(weight.new_zeros(shape))
            for shape in ((count * rank, columns), (count, math.prod(rows), rank))
        )
        mark_experts([self.a, self.b], cut_dim=0)
        if not hasattr(experts, "adapter"):
            experts.adapter = torch.nn.ModuleDict()
        experts.adapter["weight1" if weight is experts.weight1 else "weight2"] = self
        multiply = experts.multiply

        def multiply_adapted(x: Tensor, other: Tensor, ends: Tensor) -> Tensor:
            y = multiply(x, other, ends)
            if other.data_ptr() != weight.data_ptr() or not self.enabled:
                return y
            low = multiply(x, self.a.unflatten(0, (count, -1)), ends)
            return y + multiply(low, self.b, ends) * self.scale

        experts.multiply = multiply_adapted

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return ``W + s B A`` of each expert, computed in fp32 and rounded to W's type once."""
        change = self.b.float() @ self.a.float().unflatten(0, (len(self.b), -1))
        return (weight.float() + self.scale * change.view(weight.shape)).to(weight.dtype)


class _Down(torch.autograd.Function):
    """Computes ``A x``. An input that another tensor can be made into again is not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, source: Tensor, rebuild: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.save_for_backward(a, source)
        ctx.rebuild = rebuild
        return F.linear(x, a)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor, None, None]:
        (gradient,), (a, x) = gradients, ctx.saved_tensors
        x = ctx.rebuild(x) if ctx.rebuild else x
        of_x, gradient = None, gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:  # no view of another tensor: autograd then adds the layer's gradient in place
            of_x = torch.empty_like(x)
            torch.mm(gradient, a, out=of_x.view(-1, a.shape[1]))
        return of_x, gradient.T @ x.flatten(0, -2), None, None


class _Up(torch.autograd.Function):
    """Adds ``s B x`` to an output in place. Gradients go on in the order of their axes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, b: Tensor, scale: float, is_own: bool) -> Tensor:
        ctx.save_for_backward(x, b)
        ctx.scale = scale
        # ``mark_dirty`` refuses views, so a view is changed through ``detach``. No earlier node needs the old output.
        sum_ = y if is_own else y.detach()
        sum_.view(-1, y.shape[-1]).addmm_(x.flatten(0, -2), b.T, alpha=scale)
        if is_own:
            ctx.mark_dirty(y)
        return sum_

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gradient, (x, b) = _lay_flat(gradients[0]), ctx.saved_tensors
        rows = gradient.view(-1, gradient.shape[-1])
        of_x = (rows @ b).mul_(ctx.scale).view(x.shape)
        return gradient, of_x, (rows.T @ x.flatten(0, -2)).mul_(ctx.scale), None, None


class _Gate(torch.autograd.Function):
    """Computes ``f(g) * u`` of gate and up projection side by side, and keeps nothing else for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return _gate(x, activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        gate, up = x.detach().chunk(2, -1)
        with torch.enable_grad():
            opened = ctx.activation(gate.requires_grad_())
        of_x = torch.empty_like(x)
        of_gate, of_up = of_x.chunk(2, -1)
        torch.mul(gradient, opened.detach(), out=of_up)
        torch.mul(gradient, up, out=of_gate)
        of_gate.copy_(*torch.autograd.grad(opened, gate, of_gate))
        return of_x, None


def _gate(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = x.chunk(2, -1)
    return activation(gate).mul_(up)


def keep_less(module: torch.nn.Module) -> None:
    """Let layers with adapters keep neither outputs of norms nor those of activations for the backward pass: no frozen
    weight needs them, and adapters make them again."""
    for each in module.modules():
        if isinstance(each, RMSNorm | NormFromOne):
            each.register_forward_hook(
                lambda norm, inputs, output: setattr(output, _REBUILD, (norm.forward, inputs[0]))
            )
        if type(each) is MLP:  # experts have their own
            cast(Any, each).forward = partial(_run_mlp, each)


def _run_mlp(mlp: Any, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Run an MLP as Megatron does, without biases."""
    x, _ = mlp.linear_fc1(hidden)
    opened = _Gate.apply(x, mlp.config.activation_func)
    setattr(opened, _REBUILD, (partial(_gate, activation=mlp.config.activation_func), x))
    return mlp.linear_fc2(opened)


def _lay_flat(x: Tensor) -> Tensor:
    """Lay a tensor ``[s, b, n]`` out in the order of its axes. A product with a frozen weight would otherwise go slot
    by slot, even where an axis of size 1 alone is out of order."""
    return x.reshape(-1, x.shape[-1]).view(x.shape)


def _lay_out(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0]
    return inputs if x.stride() == _lay_flat(x).stride() else (_lay_flat(x), *inputs[1:])


def _add(layer: Any, inputs: tuple[Tensor, ...], output: Any):
    """Add the adapter's output to that of its layer: of Megatron's a pair of the product and a place for a bias."""
    if not layer.adapter.enabled:
        return output
    if layer.adapter.is_whole:
        return layer.adapter(inputs[0], output)
    return layer.adapter(inputs[0], output[0]), output[1]
