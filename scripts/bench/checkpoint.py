"""Measure how a checkpoint is written and read: how evenly its ranks share the work, seconds, memory and digests.

    python scripts/bench/checkpoint.py [--ranks 4] [--tiny] [--json FILE]

A Qwen2 of 28 million parameters at data parallelism 4: 111 MB a rank. Three ways in turn within one run: every rank
gathers the optimizer's whole state and rank 0 writes it, which is what Megatron-core does; the same with the writing
dealt out by Megatron's FullyParallelSaveStrategyWrapper; and ours, in which a rank writes what it owns. Medians.
Extra memory is the largest resident size of any rank above that before; files are read from the page cache.
"""

import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from timing import make_parser, write_figures

PARSER = make_parser(__doc__)
PARSER.add_argument("--ranks", type=int, default=4)
OPTIONS = PARSER.parse_args()
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2) if OPTIONS.tiny else {}
SIZES = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=6) | SIZES
RANKS, VOCAB, ROUNDS = (2, 256, 1) if OPTIONS.tiny else (OPTIONS.ranks, 8192, 3)


def build_engine(rank: int, address: str, folder: str):
    """Build one rank's engine of the model in a folder."""
    from engines.config import MegatronConfig
    from engines.models.spec import ModelSpec
    from hardware.platforms import DEFAULT_PLATFORM, get_platform

    platform, config = get_platform(DEFAULT_PLATFORM), MegatronConfig(ranks=RANKS)
    os.environ.update(platform.get_train_env())
    device = platform.init_process(rank)
    from engines.megatron.engine import MegatronEngine, init_distributed

    init_distributed(platform, config, rank, address, 0)
    return MegatronEngine(ModelSpec.from_folder(folder), config, platform, device)


def save_gathered(engine, folder: str, is_dealt: bool) -> None:
    """Save as Megatron-core does, rank 0 alone or with the writing dealt out."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from engines.megatron.checkpoint import LAYOUT, SaveInProcess

    for part in engine.optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
    strategy = SaveInProcess("torch_dist", 1)
    if is_dealt:
        strategy = FullyParallelSaveStrategyWrapper(strategy, mpu.get_data_parallel_group(with_context_parallel=True))
    dist_checkpointing.save(name_gathered(engine, False), folder, strategy, content_metadata=dict(LAYOUT))


def load_gathered(engine, folder: str) -> None:
    """Load as Megatron-core does: every rank reads the whole optimizer's state."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(name_gathered(engine, True), folder)
    engine.module.module.load_state_dict(state["model"])
    engine.optimizer.load_state_dict(state["optimizer"])


def name_gathered(engine, is_loading: bool) -> dict:
    from engines.megatron.checkpoint import LAYOUT

    model = engine.module.module.sharded_state_dict(metadata=dict(LAYOUT))
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(LAYOUT))
    return {"model": model, "optimizer": optimizer, "schedule": engine.schedule.state_dict()}


def measure_rank(rank: int, address: str, model: str, folder: str) -> None:
    """Save and load in each way, in turn; this rank's figures go to a file."""
    import torch.distributed as dist

    from rlworker.tracking.digests import digest_files

    engine = build_engine(rank, address, model)
    ways = {
        "gathered, rank 0 writes": (lambda to: save_gathered(engine, to, False), lambda at: load_gathered(engine, at)),
        "gathered, dealt out": (lambda to: save_gathered(engine, to, True), lambda at: load_gathered(engine, at)),
        "own shares": (engine.save, engine.load),
    }
    figures = {way: defaultdict(list) for way in ways}
    for number in range(ROUNDS):
        for way, (save, load) in ways.items():
            target = Path(folder) / f"{way} {number}"
            if rank == 0:
                target.mkdir()
            dist.barrier()
            for name, call in (("save", save), ("load", load)):
                seconds, megabytes = measure_call(call, str(target))
                figures[way][f"{name} s"].append(seconds)
                figures[way][f"{name} extra MB"].append(megabytes)
            mine = [path.name for path in target.glob(f"__{rank}_*")]
            seconds, _ = measure_call(digest_files, target, mine)
            figures[way]["digest s"].append(seconds)
            figures[way]["MB"].append(sum(os.path.getsize(target / name) for name in mine) / 1e6)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(target)
    medians = {way: {name: statistics.median(each) for name, each in own.items()} for way, own in figures.items()}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(medians))


def measure_call(call: Callable, *args) -> tuple[float, float]:
    """Return the seconds of a call on the slowest rank, and the megabytes that this process grew by at most."""
    import torch.distributed as dist

    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    before, start = read_memory("VmRSS"), time.perf_counter()
    call(*args)
    dist.barrier()
    return time.perf_counter() - start, read_memory("VmHWM") - before


def read_memory(field: str) -> float:
    """Return the megabytes that this process has in memory now (VmRSS) or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


def make_row(way: str, ranks: list[dict[str, float]]) -> dict[str, str | float]:
    """Make a row of the table from the figures of all ranks."""
    sizes = [rank["MB"] for rank in ranks]
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    mean = sum(sizes) / len(sizes)
    row = {"way": way, "MB a rank": mean, "largest file / mean": max(sizes) / mean}
    row |= {name: most[name] for name in ("save s", "load s", "save extra MB", "load extra MB", "digest s")}
    return row | {"digest MB/s": sum(sizes) / most["digest s"]}


def main() -> None:
    from torch import multiprocessing

    from rlworker.checks.tiny_models import make_tiny_text

    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        model = make_tiny_text(f"{folder}/model", "qwen2", VOCAB, **SIZES)
        multiprocessing.spawn(measure_rank, (address, model, folder), nprocs=RANKS)
        ranks = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(RANKS)]
    rows = [make_row(way, [rank[way] for rank in ranks]) for way in ranks[0]]
    for row in rows:
        print(f"{row['way']}: " + ", ".join(f"{name} {row[name]:.4g}" for name in row if name != "way"))
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
