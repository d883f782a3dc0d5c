"""Collectives and messages of a rank, as torch's operators of the namespace ``c10d`` are called."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    """A collective, or a message to another rank.

    Attributes:
        name: operator of torch's namespace ``c10d``, such as allreduce.
        group: Megatron's name of the group, such as tensor_model_parallel; "default_pg" is that of all ranks.
        ranks: of the group. nbytes: of the largest tensor of the call.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int


def describe_call(operator: Any, args: tuple) -> Call:
    """Describe the call of an operator of the namespace ``c10d``."""
    groups = (each for each in args if isinstance(each, torch.ScriptObject))
    group = next(dist.ProcessGroup.unbox(each) for each in groups)
    nbytes = max((each.nbytes for each in tree_leaves(args) if isinstance(each, Tensor)), default=0)
    ranks = tuple(dist.get_process_group_ranks(group))
    name = group.group_desc.lower().removesuffix("_group")
    return Call(operator.overloadpacket.__name__.strip("_"), name, ranks, nbytes)
