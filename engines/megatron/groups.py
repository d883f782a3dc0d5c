"""Megatron's process groups of this rank: made, left, and returned by the type that they have once they are there.

Megatron's own annotations also allow the values from before.
"""

import datetime
import os
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch.distributed import ProcessGroup, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # as documented

from engines.config import MegatronConfig
from engines.models.weight import Way
from hardware.collectives import refuse_shared_devices
from hardware.platform import Platform

_START = datetime.timedelta(minutes=30)
"""The ranks of one engine may be apart by so much when they start: imports come from a shared disk, and in turn."""


def open_store(host: str, port: int, listen: bool) -> TCPStore:
    """Open the store by which ranks find each other: rank 0's listens, at any free port where ``port`` is 0."""
    return TCPStore(host, port, is_master=listen, timeout=_START, wait_for_workers=False)


def init_distributed(
    platform: Platform, config: MegatronConfig, rank: int, address: str, seed: int, store: Store | None = None
) -> None:
    """Join the ranks of one engine: ``address`` is ``host:port`` of rank 0. ``leave_distributed`` undoes it.

    Args:
        store: rank 0's, where it listens already.

    Raises:
        RuntimeError: two ranks have one device.
        torch.distributed.DistStoreError: a rank has not come within half an hour.
    """
    if config.deterministic:
        os.environ.update(platform.get_deterministic_env())  # read with the first product and the first collective
    torch.use_deterministic_algorithms(config.deterministic)
    timeout = datetime.timedelta(seconds=config.timeout_s)
    host, port = address.rsplit(":", 1)
    store = store or open_store(host, int(port), listen=rank == 0)
    # Whoever comes first waits here; from now on all are there, and a collective's own limit is long enough.
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {other}" for other in range(config.ranks)], _START)
    dist.init_process_group(platform.dist_backend, store=store, rank=rank, world_size=config.ranks, timeout=timeout)
    refuse_shared_devices(platform.get_device_key(), cast(dist.ProcessGroup, dist.group.WORLD))
    mpu.initialize_model_parallel(
        config.tp,
        config.pp,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.cut_sizes["ep"],
        expert_tensor_parallel_size=config.cut_sizes["etp"],
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, config.timeout_s // 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_distributed() -> None:
    """Leave the other ranks and end the threads of every process group; engines of these groups must be gone."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def get_cut_group(way: Way) -> ProcessGroup:
    """Return the ranks that hold the parts of a parameter which is cut in this way."""
    found = {
        "tp": mpu.get_tensor_model_parallel_group,
        "ep": mpu.get_expert_model_parallel_group,
        "etp": mpu.get_expert_tensor_parallel_group,
    }
    return cast(ProcessGroup, found[way]())
