"""One rank in shapes: its engine is built, takes an optimizer step and exports its weights, as on a real machine."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engines.config import MegatronConfig
from engines.models.spec import ModelSpec


@dataclass(frozen=True)
class RankCase:
    """A rank to run.

    Attributes:
        rank: its number among all. platform: name of the platform.
        lengths: tokens of each sequence of a micro-batch. micro_batches: number of equal micro-batches of the step.
    """

    model: ModelSpec
    config: MegatronConfig
    platform: str
    rank: int
    lengths: tuple[int, ...]
    micro_batches: int
    bucket_bytes: int = 2**26


@dataclass
class RankRun:
    """What a rank did.

    Attributes:
        seconds: phase -> seconds of this machine. held: kind -> bytes after the step, as the engine lists them.
        peaks, begins: phase -> most bytes on the device, and those at its begin. live: bytes after the step.
        exported: number of exported tensors, their bytes and number of buckets.
        collectives: (name, ranks) -> (number, bytes).
    """

    rank: int
    stage: int
    seconds: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)
    live: int = 0
    operators: int = 0
    exported: tuple[int, int, int] = (0, 0, 0)
    collectives: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)


class _ConfigFolder:
    """A folder's weights in the shapes that its config.json states, in place of ``SafetensorsFolder``."""

    mode: Any
    model: ModelSpec

    def __init__(self, folder: str):
        self.names = self.model.list_hf_names()

    def check(self, model: ModelSpec) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str):
        import torch

        return self.mode.make_on_host(self.model.find_hf_shape(name), torch.bfloat16)

    def read_rows(self, name: str, start: int, count: int):
        return self[name][start : start + count]


def run_rank(case: RankCase) -> RankRun:
    """Run a rank in this process, which is of no other use afterwards."""
    import torch
    import torch.distributed as dist

    from hardware.platforms import get_platform
    from hardware.shapes.device import ShapeMode
    from hardware.shapes.platform import make_shaped

    platform = make_shaped(get_platform(case.platform))
    device = platform.init_process(0)
    from engines.megatron import engine as engines
    from engines.megatron import weights
    from engines.megatron.groups import init_distributed

    mode, config = ShapeMode(device), case.config
    _ConfigFolder.mode, _ConfigFolder.model = mode, case.model
    weights.SafetensorsFolder = _ConfigFolder
    build = engines.build_model

    def build_on_device(*args):
        with device:  # experts are made on the host first, which takes memory here
            module = build(*args)
        module.to = lambda _: module  # torch cannot move a parameter without numbers
        return module

    engines.build_model = build_on_device
    _exchange_objects(case)
    store = dist.HashStore()
    for rank in range(config.ranks):
        store.set(f"rank {rank}", "here")
    run = RankRun(case.rank, 0)
    with mode:
        with _timed(run, "start"):
            init_distributed(platform, config, case.rank, "localhost:0", 0, store)
        mode.live.begin("build")
        with _timed(run, "build"):
            engine = engines.MegatronEngine(case.model, config, platform, device)
        _take_step(engine, case, mode, run)
        run.held, run.live = list_held(engine), mode.live.now
        mode.live.begin("export")
        with _timed(run, "export"):
            run.exported = _export(engine, case)
    run.peaks, run.begins, run.operators = mode.live.peaks, mode.live.begins, mode.operators
    run.collectives = {key: (count, mode.sent[key]) for key, count in mode.collectives.items()}
    return run


from contextlib import contextmanager


@contextmanager
def _timed(run, phase):
    start = time.monotonic()
    yield
    run.seconds[phase] = time.monotonic() - start


def _make_shard(engine, case):
    import torch
    from dataclasses import replace
    from engines.batch.batch import TrainBatch
    from engines.batch.shard import Shard
    rows = [[1] * n for n in case.lengths] * case.micro_batches
    batch = TrainBatch.from_ids(rows, [max(1, n // 4) for n in case.lengths] * case.micro_batches)
    batch = replace(batch, advantages=torch.ones(batch.num_tokens))
    counts = (len(case.lengths),) * case.micro_batches
    return Shard(batch, counts, 0, engine.dp_rank, 0)


def _loss(outputs, batch):
    loss = -(batch.advantages * outputs.logprobs * batch.mask).sum()
    return loss, {"loss": loss.detach()}


def _take_step(engine, case, mode, run):
    shard = _make_shard(engine, case)
    step = engine.optimizer.step

    def step_in_phase():
        mode.live.begin("optimizer step")
        return step()

    engine.optimizer.step = step_in_phase
    mode.live.begin("forward and backward")
    with _timed(run, "step"):
        engine.train_step(shard, _loss, 1.0)


def list_held(engine):
    import torch
    buffers = [*engine.module.buffers, *engine.module.expert_parallel_buffers]
    parts = engine.optimizer.chained_optimizers
    masters = [s for part in parts for g in part.shard_fp32_from_float16_groups for s in g]
    states = [v for part in parts for state in part.optimizer.state.values() for v in state.values()]
    return {
        "parameters": sum(b.param_data.nbytes for b in buffers) + sum(p.nbytes for p in engine.module.parameters() if not p.requires_grad)
        + sum(r.bias.nbytes for r in (engine.routers.layers if engine.routers else ()) if r.bias is not None),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(t.nbytes for t in [*masters, *states] if isinstance(t, torch.Tensor)),
    }


def _export(engine, case):
    import engines.weight_sync as sync
    sizes = []
    def note(parts):
        return sync.WeightBucket(tuple((p.name, tuple(p.tensor.shape), str(p.tensor.dtype), 0) for p in parts), None, 0)
    def named():
        for name, t in engine.export_weights():
            assert tuple(t.shape) == case.model.find_hf_shape(name)
            sizes.append(t.nbytes)
            yield name, t
    from dataclasses import replace
    sync._pack = note
    n = 0
    for b, last in sync.pack_buckets(named(), case.bucket_bytes):
        n += 1
    return len(sizes), sum(sizes), n


def _exchange_objects(case):
    import torch.distributed as dist

    def gather(found, own, group=None):
        found[:] = [own] * len(found)

    dist.all_gather_object = gather
