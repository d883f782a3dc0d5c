"""Sharded checkpoints of model, optimizer and schedule, in Megatron's torch_dist format.

Every rank writes its share: the part of the optimizer state that it owns, as boxes of each parameter's tensor, and a
part of the model's weights, which are divided over the data-parallel ranks. A checkpoint has one whole tensor of each
kind per parameter, independent of the ranks that wrote its boxes. So it can be read at any parallel sizes.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from engines.megatron.groups import get_cut_group
from engines.models.weight import Weight

Learned = Mapping[str, tuple[Weight, torch.nn.Parameter]]
"""Parameters of this rank by Megatron's names, layers numbered over the whole model, and how each is cut."""
LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""Megatron's name of the stored layout. Megatron itself would gather the whole state on every rank to write it."""
_BY_SHARES = "fully_sharded_model_space"
"""Megatron's name for state that is handed to it as each rank's own share, flat."""
_OF_SETTINGS = ("max_lr", "min_lr", "betas", "eps")
"""Entries of a parameter group that a run takes from its settings, not from a checkpoint."""


class SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron's format written by torch's own writer, in this process.

    Megatron's writer starts a manager process and forks one more per file. Inside a worker, with its threads, a fork
    can deadlock, and both cost more than the write at small sizes.
    """

    def save(self, sharded_state_dict, checkpoint_dir):
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            save_state(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)


def cut_boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements ``start`` to ``end`` of a flattened array into boxes of it, in order.

    Yields:
        where a box begins, and its shape. At most ``2 x dimensions - 1`` of them: of ``shape`` (4, 10), 7 to 25 is the
        end of row 0, row 1 and the beginning of row 2.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    size = math.prod(shape[1:])
    first, last = -(-start // size), end // size  # whole rows
    if first > last:  # none, and all within one
        yield from _cut_row(shape, last, start, end)
        return
    yield from _cut_row(shape, first - 1, start, first * size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _cut_row(shape, last, last * size, end)


def _cut_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[tuple]:
    ahead = row * math.prod(shape[1:])
    for offset, box in cut_boxes(shape[1:], start - ahead, end - ahead):
        yield (row, *offset), (1, *box)


def _iterate_shares(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Iterate over the parameters of which this rank owns optimizer state, with the first and the end of the elements
    that it owns, in Megatron's order."""
    for ranges_of_buffer in part.gbuf_ranges:
        for ranges_of_buckets in ranges_of_buffer.values():
            for bucket in ranges_of_buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _cut_share(
    kind: str, values: Tensor, whole: ShardedTensor | ShardedTensorFactory, start: int, is_loading: bool
) -> list[ShardedTensor]:
    """Name a rank's share of one kind of a parameter's state, as boxes of the stored tensor, in order.

    Args:
        values: ``[elements of the share]``. whole: where the parameter itself is in the stored one; a factory cuts it
            into parts. start: the first of the parameter's elements that is this rank's.
    """
    parts = nested_values(whole.build()) if isinstance(whole, ShardedTensorFactory) else [whole]
    boxes = []
    for part in cast(list[ShardedTensor], list(parts)):
        data = cast(Tensor, part.data)
        if not data.is_contiguous():
            raise RuntimeError(f"checkpoint: {part.key} is stored in parts that do not lie whole in {whole.key}")
        first = cast(int, data.storage_offset()) - cast(int, cast(Tensor, whole.data).storage_offset())
        low, high = max(start, first), min(start + len(values), first + data.numel())
        ahead = part.prepend_axis_num  # axes of the stored tensor alone, for instance of layers
        at = low - start
        for place, shape in cut_boxes(part.local_shape, low - first, high - first):
            shape = (1,) * ahead + shape
            box = replace(
                part,
                key=f"optimizer.state.{kind}.{part.key}",
                data=values[at : at + math.prod(shape)].view(shape),
                dtype=values.dtype,
                local_shape=shape,
                global_offset=tuple(map(sum, zip(part.global_offset, (0,) * ahead + place, strict=True))),
                axis_fragmentations=None,  # boxes are of any size
                replica_id=(*cast(tuple, part.replica_id)[:2], 0),  # no other data-parallel rank has this share
                prepend_axis_num=0,
            )
            boxes.append(replace(box, data=None) if is_loading else box)
            at += math.prod(shape)
    return boxes


def _name_shares(part: DistributedOptimizer, model: dict, is_loading: bool) -> dict:
    """Name the optimizer state that this rank owns, and the state that is equal on all ranks."""
    part.init_state_fn(part.optimizer, part.config)  # one that has not taken a step yet has no moments
    tensors, _ = extract_sharded_tensors_and_factories(model)
    whole = {each.data: each for each in nested_values(tensors)}
    shares = {}
    for place, (parameter, start, end) in enumerate(_iterate_shares(part)):
        kinds = part._get_main_param_and_optimizer_states(parameter)
        shares[place] = {
            kind: _cut_share(kind, values, whole[parameter], start, is_loading)
            for kind, values in kinds.items()
            if kind != "step"  # the step is stored once, as equal on all ranks
        }
        assert all(len(values) == end - start for kind, values in kinds.items() if kind != "step")
    kind = LAYOUT["distrib_optim_sharding_type"]
    return part.state_dict() | {"param_state": shares, "param_state_sharding_type": kind}


def _join_shares(state: dict) -> dict:
    """Put the boxes that were loaded of each share together, as Megatron takes it."""
    joined = {
        # Most parameters lie whole on one rank, as one box that needs no copy.
        place: {
            kind: torch.cat([b.flatten() for b in boxes]) if boxes[1:] else boxes[0].flatten()
            for kind, boxes in kinds.items()
        }
        for place, kinds in state.get("param_state", {}).items()  # a stage without experts has none of theirs
    }
    return state | {"param_state": joined, "param_state_sharding_type": _BY_SHARES}


def _place_learned(learned: Learned) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Place this rank's parameters in whole tensors, by the way in which each is cut."""
    placed, of_experts = {}, mpu.get_expert_data_parallel_rank()
    of_others = mpu.get_data_parallel_rank(with_context_parallel=True)
    for name, (weight, parameter) in learned.items():
        replica = of_experts if "ep" in weight.cut.values() else of_others
        groups = {axis: get_cut_group(way) for axis, way in weight.cut.items()}
        cuts = [(axis, group.rank(), group.size()) for axis, group in groups.items()]
        copy = 0 if cuts else mpu.get_tensor_model_parallel_rank()
        part = ShardedTensor.from_rank_offsets(name, parameter, *cuts, replica_id=(0, copy, replica))
        # Of a gated pair each half is cut for itself, so that a rank's part is no run of rows.
        placed[name] = apply_swiglu_sharded_factory(part, ()) if cuts and weight.join.parts > 1 else part
    return placed


def _state(module, optimizer, schedule, is_loading: bool, learned: Learned | None) -> dict:
    """Name everything that a checkpoint holds of this rank: the tensors to save, or to load into."""
    # Megatron writes its process groups into the dict it is given, so each call gets one of its own.
    model = module.module.sharded_state_dict(metadata=dict(LAYOUT)) if learned is None else _place_learned(learned)
    parts = [_name_shares(part, model, is_loading) for part in optimizer.chained_optimizers]
    # A rank's optimizer without parameters has taken no step, and the first rank's numbers are stored for all.
    groups = [group for part in parts for group in part["optimizer"]["param_groups"] if "step" in group]
    taken = max((group["step"] for group in groups), default=0)
    for group in groups:
        group["step"] = taken
    # As Megatron numbers them, which takes a single one as it is.
    state = parts[0] if len(parts) == 1 else dict(enumerate(parts))
    return {"model": model, "optimizer": state, "schedule": schedule.state_dict()}


def save_checkpoint(folder: str, module, optimizer, schedule, learned: Learned | None = None) -> list[str]:
    """Write this rank's part into ``folder``, which exists and is empty. Collective.

    Args:
        learned: the only parameters to save, where those beside them stay as they were read; None saves all.

    Returns:
        the names of the files that this rank wrote.
    """
    ranks = cast(torch.distributed.ProcessGroup, mpu.get_data_parallel_group(with_context_parallel=True))
    strategy = FullyParallelSaveStrategyWrapper(SaveInProcess("torch_dist", 1), ranks)
    state = _state(module, optimizer, schedule, False, learned)
    dist_checkpointing.save(state, folder, strategy, content_metadata=dict(LAYOUT))
    rank = torch.distributed.get_rank()
    names = [path.name for path in Path(folder).iterdir()]
    return [name for name in names if name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))]


def load_checkpoint(folder: str, module, optimizer, schedule, learned: Learned | None = None) -> None:
    """Load a checkpoint of ``save_checkpoint``, at the same or other parallel sizes. Collective.

    The optimizer's settings stay as they are: a run may go on at another learning rate.

    Args:
        learned: as it was saved.

    Raises:
        ValueError: the folder holds no checkpoint.
    """
    if not (Path(folder) / "metadata.json").is_file():
        raise ValueError(f"checkpoint: {folder!r} is not a complete checkpoint (it has no metadata.json)")
    state = cast(dict, dist_checkpointing.load(_state(module, optimizer, schedule, True, learned), folder))
    if learned is None:
        module.module.load_state_dict(state["model"])
    for name, (_, parameter) in (learned or {}).items():
        parameter.data.copy_(state["model"][name])
    parts = state["optimizer"]
    settings = [{name: group[name] for name in _OF_SETTINGS} for group in optimizer.param_groups]
    optimizer.load_state_dict(
        _join_shares(parts)
        if len(optimizer.chained_optimizers) == 1
        else {place: _join_shares(part) for place, part in parts.items()}
    )
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    schedule.num_steps = 0  # the schedule adds the steps that it loads to those it has counted
    schedule.load_state_dict(state["schedule"])
    torch.distributed.barrier()
