"""Attributes that Megatron reads from parameters, and that torch's class does not have."""

from collections.abc import Iterable
from typing import Any


def mark_sequence_parallel(parameters: Iterable[Any], config) -> None:
    """Mark parameters that every tensor-parallel rank holds whole, by the attribute that Megatron reads.

    Under sequence parallelism each rank sees a part of the tokens, and Megatron sums the gradients of marked parameters
    over the ranks.
    """
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel


def mark_experts(parameters: Iterable[Any], cut_dim: int) -> None:
    """Mark parameters of experts, as Megatron looks for it.

    Their gradients are summed over the ranks that hold the same experts, at every size, so that a checkpoint has their
    state apart from others' at every size too. Each rank counts its own in the gradient's norm.
    """
    for parameter in parameters:
        parameter.allreduce = False
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, cut_dim, 1
