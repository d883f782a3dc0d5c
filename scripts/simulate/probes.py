"""Probes of this machine: what a core multiplies, what a pass through a layer takes at least, what gloo sends."""

import socket
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from hardware.platforms import DEFAULT_PLATFORM
from rlworker.checks.tiny.models import make_tiny_text


def probe_products() -> float:
    """Measure the FLOP/s of a product as wide as a layer, on one core."""
    torch.set_num_threads(1)
    left, right, fastest = torch.randn(2048, 512), torch.randn(512, 1536), float("inf")
    for _ in range(20):
        start = time.process_time()
        left @ right
        fastest = min(fastest, time.process_time() - start)
    return 2 * 2048 * 512 * 1536 / fastest


def _time_layers(folder: str, found: Any) -> None:
    from engines.config import MegatronConfig
    from engines.models.spec import ModelSpec
    from hardware.platforms import get_platform
    from rlworker.checks.shapes.case import RankCase

    platform, model, config = get_platform(DEFAULT_PLATFORM), ModelSpec.from_folder(folder), MegatronConfig()
    device = platform.init_process(0)
    from engines.megatron.engine import MegatronEngine
    from engines.megatron.groups import init_distributed
    from rlworker.checks.shapes.rank import compute_loss, make_shard

    init_distributed(platform, config, 0, "localhost:0", 0, dist.HashStore())
    torch.set_num_threads(1)
    engine, seconds = MegatronEngine(model, config, platform, device), []
    for micros in (1, 1, 65):  # the first warms up
        shard = make_shard(RankCase(model, config, platform.name, 0, 4, 1, micros), 0)
        start = time.process_time()
        engine.train_step(shard, compute_loss, 1.0)
        seconds.append(time.process_time() - start)
    found.put((seconds[2] - seconds[1]) / 64 / 3 / model.layers)


def probe_layer() -> float:
    """Measure the CPU-seconds of a pass through a layer where nearly nothing is computed; a backward pass is two."""
    context = get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as name:
        make_tiny_text(name, "qwen2", 128, num_hidden_layers=8)
        process = context.Process(target=_time_layers, args=(name, found))
        process.start()
        process.join()
    if process.exitcode:
        raise SystemExit(f"forecast: the probe of a layer ended with exit code {process.exitcode}; its error is above")
    return found.get()


def _call_gloo(rank: int, port: int, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seconds = []
    for numbers in (2**10, 2**18):
        whole, part, rounds = torch.ones(2 * numbers), torch.ones(numbers), 40
        start = time.process_time()
        for _ in range(rounds):
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
        seconds.append((time.process_time() - start) / rounds / 2)
    if rank == 0:
        found.put((seconds[0], 4 * (2**18 - 2**10) / (seconds[1] - seconds[0])))


def probe_link() -> tuple[float, float]:
    """Measure gloo between two processes: a rank's CPU-seconds of a call, and its bytes in a CPU-second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn")
    found = context.SimpleQueue()
    ranks = [context.Process(target=_call_gloo, args=(rank, port, found)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return found.get()
