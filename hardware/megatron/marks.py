"""Attributes that Megatron reads from parameters, and that torch's class does not have."""

from collections.abc import Iterable
from typing import Any


def mark_sequence_parallel(parameters: Iterable[Any], config) -> None:
    """Mark parameters that every tensor-parallel rank has whole, as Megatron looks for it.

    Under sequence parallelism each rank sees a part of the tokens, and Megatron sums their gradients over these ranks.
    """
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel
