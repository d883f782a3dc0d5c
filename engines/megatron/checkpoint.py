"""Sharded checkpoints of model, optimizer and schedule, in Megatron's torch_dist format."""

import warnings
from pathlib import Path
from typing import cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

_LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class _SaveInProcess(TorchDistSaveShardedStrategy):
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


def _state(module, optimizer, schedule, is_loading: bool) -> dict:
    """Name everything that a checkpoint holds of this rank; the same call saves it and says where to load it."""
    # Megatron writes its process groups into the dict it is given, so each call gets one of its own.
    model = module.module.sharded_state_dict(metadata=dict(_LAYOUT))
    sharded = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_LAYOUT))
    return {"model": model, "optimizer": sharded, "schedule": schedule.state_dict()}


def save_checkpoint(folder: str, module, optimizer, schedule) -> None:
    """Write this rank's part into ``folder``, which exists and is empty. Collective."""
    for part in optimizer.chained_optimizers:  # one that has not taken a step yet has no moments that could be written
        part.init_state_fn(part.optimizer, part.config)
    strategy = _SaveInProcess("torch_dist", 1)
    dist_checkpointing.save(
        _state(module, optimizer, schedule, False), folder, strategy, content_metadata=dict(_LAYOUT)
    )


def load_checkpoint(folder: str, module, optimizer, schedule) -> None:
    """Restore what ``save_checkpoint`` wrote, at the same or another tp, pp or dp. Collective.

    Raises:
        ValueError: the folder holds no checkpoint.
    """
    if not (Path(folder) / "metadata.json").is_file():
        raise ValueError(f"checkpoint: {folder!r} is not a complete checkpoint (it has no metadata.json)")
    state = cast(dict, dist_checkpointing.load(_state(module, optimizer, schedule, True), folder))
    module.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.num_steps = 0  # the schedule adds the steps that it loads to those it has counted
    schedule.load_state_dict(state["schedule"])
    torch.distributed.barrier()
