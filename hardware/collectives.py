"""Collectives of context parallelism with the backward that packing needs.

Written here because the backward of ``torch.distributed.nn.functional.all_gather`` returns wrong values on gloo when
the incoming gradient is not contiguous (torch 2.13).
"""

import torch
import torch.distributed as dist
from torch import Tensor


def refuse_shared_devices(key: str | None, group: dist.ProcessGroup) -> None:
    """Compare device keys over the ranks of a group, through the group's store, before any collective.

    Args:
        key: this rank's ``Platform.get_device_key``; None if ranks may share a device.

    Raises:
        RuntimeError: two ranks have the same device, on which collectives of most backends fail late, or hang.
    """
    if key is None:
        return
    store = group.get_group_store()
    store.set(f"get_device_key/{group.rank()}", key)
    keys = [store.get(f"get_device_key/{rank}").decode() for rank in range(group.size())]
    if sharing := [rank for rank, other in enumerate(keys) if keys.count(other) > 1]:
        shared = ", ".join(sorted({keys[rank] for rank in sharing}))
        raise RuntimeError(
            f"platform: ranks {sharing} of {group.size()} share devices ({shared}), and each needs its own; lower "
            "--actor.ranks, or give each process another device"
        )


class _GatherRanks(torch.autograd.Function):
    """``x [...] -> [group, ...]``; the gradient of a rank's x is the sum of all ranks' gradients of its slice."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        ctx.group = group
        gathered = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, gradient: Tensor):
        mine = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return mine, None


class _SumForward(torch.autograd.Function):
    """Sum over the group forward, identity backward: every rank holds the sum, each owns its own summand."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def gather_keys_values(key: Tensor, value: Tensor, group) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all context-parallel ranks, in rank order: two ``[s, ...]`` -> two ``[group * s,
    ...]``.

    One collective carries both.
    """
    both = _GatherRanks.apply(torch.stack([key, value]), group)  # [group, 2, s, ...]
    return both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)


def gather_ranks(x: Tensor, group) -> Tensor:
    """Gather ``[...] -> [group, ...]`` in rank order; the backward sums the gradients of a part over all ranks."""
    return _GatherRanks.apply(x, group) if group.size() > 1 else x[None]


def sum_over_ranks(x: Tensor, group) -> Tensor:
    """Sum a tensor over ``group``, with a backward that gives each rank the gradient unchanged.

    Use it for values of which every rank holds a part (zeros elsewhere), if every rank computes the same loss from the
    sum. The sum of all ranks' parameter gradients is then the gradient of this one loss.
    """
    return _SumForward.apply(x, group)
