"""Megatron's process groups of this rank, by the type that they have once its parallel state is there.

Megatron's own annotations also say None, which a group is before that.
"""

from typing import cast

from megatron.core import parallel_state as mpu
from torch.distributed import ProcessGroup


def get_tensor_group() -> ProcessGroup:
    """Return the ranks that hold parts of the same layers."""
    return cast(ProcessGroup, mpu.get_tensor_model_parallel_group())


def get_tensor_and_context_group() -> ProcessGroup:
    """Return the ranks that hold parts of the same layers or parts of the same sequences."""
    return cast(ProcessGroup, mpu.get_tensor_and_context_parallel_group())
