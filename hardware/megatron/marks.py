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


def get_cut_dim(parameter: Any) -> int:
    """Return the dimension along which Megatron has cut a parameter over the tensor-parallel ranks."""
    return parameter.partition_dim
