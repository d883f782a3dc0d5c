"""Low-rank adapters (LoRA, arXiv:2106.09685) of Megatron's linear layers, cut over ranks as the layer is."""

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
from torch import Tensor

from hardware.megatron.marks import mark_sequence_parallel


class LinearAdapter(torch.nn.Module):
    """Adds ``s B A x`` to the output ``W x`` of a linear layer ``[out, in]``.

    The layer may be several of the model's in one, such as queries, keys and values, each with an A of its own: ``a``
    ``[targets * rank, in]`` has one below the other. ``b`` ``[out, rank]`` has the rows of B in the layer's order.

    Ranks that have rows of the layer have the same of ``b``, and each makes the ``rank`` numbers of its own tokens from
    the whole of ``a``. Ranks that have columns of the layer have the same of ``a``, and each makes the output of its
    own tokens from the whole of ``b``. In between ranks exchange ``rank`` numbers of a token, and never its states.

    Args:
        layer: the layer, to whose output the sum is added from here on.
        owners: ``[out]``, for each row of the layer on this rank the target that it is of; -1 for none.
        targets: number of targets. scale: the factor s.
    """

    def __init__(
        self, layer: ColumnParallelLinear | RowParallelLinear, owners: Tensor, targets: int, rank: int, scale: float
    ):
        super().__init__()
        self.scale, self.enabled, self.splits_input = scale, True, isinstance(layer, RowParallelLinear)
        self.sequence_parallel = layer.sequence_parallel
        weight = cast(Tensor, layer.weight)
        out, columns = weight.shape
        self.a, self.b = (
            torch.nn.Parameter(weight.new_zeros(shape)) for shape in ((targets * rank, columns), (out, rank))
        )
        whole, cut, axis = (self.b, self.a, 1) if self.splits_input else (self.a, self.b, 0)
        mark_sequence_parallel([whole], layer.config)
        set_tensor_model_parallel_attributes(whole, False, -1, 1)
        set_tensor_model_parallel_attributes(cut, True, axis, 1)
        is_own = owners[:, None] == torch.arange(targets)
        self.own: Tensor | None  # [out, targets], 1 where a row is of a target; None where all are of the only one
        self.register_buffer("own", None if is_own.all() else is_own.to(self.b), persistent=False)
        layer.adapter = self
        layer.register_forward_hook(_add)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``s B A x`` of the layer's input ``[s, b, in]``, in the form of its output ``[s, b, out]``."""
        x = F.linear(x, self.a)
        if self.sequence_parallel:
            x = (
                reduce_scatter_to_sequence_parallel_region(x)
                if self.splits_input
                else gather_from_sequence_parallel_region(x)
            )
        return F.linear(x, self.spread()) * self.scale

    def spread(self) -> Tensor:
        """Return B ``[out, targets * rank]`` for the whole of A: a row has zeros in the columns of other targets."""
        return self.b if self.own is None else (self.own[:, :, None] * self.b[:, None]).flatten(1)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return ``W + s B A`` of this rank's part of the layer, computed in fp32 and rounded to W's type once."""
        return weight.float().addmm(self.spread().float(), self.a.float(), alpha=self.scale).to(weight.dtype)


def _add(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]):
    """Add the adapter's output to that of its layer, a pair of the product and Megatron's place for a bias."""
    return (output[0] + layer.adapter(inputs[0]), output[1]) if layer.adapter.enabled else output
