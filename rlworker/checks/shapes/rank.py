"""One rank in shapes: the engine's own code builds it, takes an optimizer step and exports its weights.

It imports Megatron, so that the platform's ``init_process`` comes first.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  as documented

from engines import weight_sync
from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs, Shard, get_logprobs
from engines.megatron import engine as engines
from engines.megatron import model as models
from engines.megatron import weights
from engines.megatron.groups import init_distributed
from engines.megatron.vision import embedding
from engines.models.spec import ModelSpec
from engines.probes.saved_bytes import SavedBytes, find_place
from hardware.platform import Platform
from hardware.shapes.device import ShapeMode
from rlworker.checks.shapes.case import RankCase, RankCount
from rlworker.checks.shapes.exchange import tell_experts, tell_objects, tell_stages
from rlworker.checks.shapes.images import make_image_batch, replace_images


def run_rank(case: RankCase, platform: Platform, device: torch.device) -> RankCount:
    """Run a rank in this process, which is of no other use afterwards.

    Args:
        platform, device: the platform in shapes, and what its ``init_process`` returned.

    Raises:
        ValueError, RuntimeError: what the engine raises on a real machine; or an operator has no shapes.
    """
    mode, count, store = ShapeMode(device, platform.kernel_memory), RankCount(), HashStore()
    tell_objects(case, device)
    tell_stages(case, mode)
    if case.model.experts:
        tell_experts(case, mode)
    if case.model.vision:
        replace_images(case.model.vision, mode, embedding)
    _replace_files(case.model, mode)
    for rank in range(case.config.ranks):
        store.set(f"rank {rank}", "here")
    with mode:
        with _timed(count, "build"):
            init_distributed(platform, case.config, case.rank, "localhost:0", 0, store)
            engine = engines.MegatronEngine(case.model, case.config, platform, device)
        mode.flops, mode.operators, begin = 0, 0, len(mode.calls)
        with _timed(count, "step"):
            count.kept = _take_step(engine, case, mode)
        count.flops, count.operators, count.calls = mode.flops, mode.operators, mode.calls[begin:]
        count.held = list_held(engine)
        mode.live.begin("export")
        with _timed(count, "export"):
            _export(engine, case, count)
    count.peaks, count.begins = mode.live.peaks, mode.live.begins
    return count


@contextmanager
def _timed(count: RankCount, phase: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    count.seconds[phase] = time.monotonic() - start


def _replace_files(model: ModelSpec, mode: ShapeMode) -> None:
    """Replace the folder's weights by shapes, and build modules where they belong: torch cannot move parameters of
    shapes alone."""
    build = engines.build_model

    def build_on_device(*settings: Any) -> Any:
        with mode.device:
            return build(*settings)

    def move_buffers(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        for part in module.modules():
            part._buffers.update({name: each.to(device) for name, each in part._buffers.items() if each is not None})
        return module

    reader: Any = weights
    reader.SafetensorsFolder = lambda _: _ConfigFolder(model, mode)
    reader.check_tensors = lambda *_: None  # no file could differ
    decoder: Any = models.Decoder
    decoder.to = move_buffers
    builder: Any = engines
    builder.build_model = build_on_device


class _ConfigFolder:
    """The weights of a folder in the shapes that its config.json states, read as from a ``SafetensorsFolder``."""

    def __init__(self, model: ModelSpec, mode: ShapeMode):
        self.model, self.mode, self.names = model, mode, model.list_hf_names()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        with self.mode.on_host:
            return torch.empty(self.model.find_hf_shape(name), dtype=torch.bfloat16)

    def read_rows(self, name: str, start: int, count: int) -> Tensor:
        """Return ``count`` rows of a tensor."""
        return self[name][start : start + count]


def make_shard(case: RankCase, replica: int) -> Shard:
    """Make a replica's micro-batches of equal sequences: three quarters are sampled, beside an image an eighth."""
    rows, prompt = case.sequences * case.micro_batches, max(1, case.length // 4)
    if case.model.vision:
        batch = make_image_batch(case.model.vision, case.length, rows)
    else:
        batch = TrainBatch.from_ids([[1] * case.length] * rows, [prompt] * rows)
    batch = replace(batch, advantages=torch.ones(batch.num_tokens))
    return Shard(batch, (case.sequences,) * case.micro_batches, 0, replica, 0)


def compute_loss(outputs: Outputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the sum of a policy gradient's loss, which keeps as little as any loss does."""
    logprobs = get_logprobs(outputs) * batch.mask
    loss = -(logprobs if batch.advantages is None else batch.advantages * logprobs).sum()
    return loss, {"loss": loss.detach()}


def _take_step(engine: Any, case: RankCase, mode: ShapeMode) -> int:
    """Take an optimizer step, and return the most bytes that autograd held in it."""
    step = engine.optimizer.step
    engine.optimizer.step = lambda: (mode.live.begin("optimizer"), step())[1]
    mode.live.begin("passes")
    saved = SavedBytes({find_place(parameter) for parameter in engine.module.parameters()})
    with saved.counting():
        engine.train_step(make_shard(case, engine.dp_rank), compute_loss, 1.0)
    return saved.most


def list_held(engine: Any) -> dict[str, int]:
    """List the bytes of parameters, gradients and optimizer state on an engine's device, after a step or more."""
    buffers = [*engine.module.buffers, *engine.module.expert_parallel_buffers]
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    biases = [
        router.bias
        for router in (engine.extensions["experts"].routers.layers if "experts" in engine.extensions else ())
        if router.bias is not None
    ]
    parts = engine.optimizer.chained_optimizers
    masters = [shard for part in parts for group in part.shard_fp32_from_float16_groups for shard in group]
    states = [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
    kept = [each for each in (*masters, *states) if isinstance(each, Tensor) and each.device == engine.device]
    return {
        "parameters": sum(each.nbytes for each in [*(buffer.param_data for buffer in buffers), *frozen, *biases]),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(each.nbytes for each in kept),
    }


def _export(engine: Any, case: RankCase, count: RankCount) -> None:
    """Export all weights in buckets, whose bytes are counted and not copied.

    Raises:
        RuntimeError: a tensor is missing, or has another shape than in config.json.
    """
    shapes = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in engine.export_weights():
            shapes[name] = tuple(tensor.shape)
            count.exported += tensor.nbytes
            yield name, tensor

    pack: Any = weight_sync
    pack._pack = lambda parts: weight_sync.WeightBucket((), torch.empty(0).numpy(), 0)
    count.buckets = sum(1 for _ in weight_sync.pack_buckets(stream(), case.bucket_bytes))
    count.tensors, expected = len(shapes), {name: case.model.find_hf_shape(name) for name in case.model.list_hf_names()}
    if shapes and shapes != expected:
        wrong = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        raise RuntimeError(
            f"export: rank {case.rank} gives {shapes.get(wrong[0])} for {wrong[0]}, expected {expected.get(wrong[0])} "
            f"from config.json ({len(wrong)} tensors differ)"
        )
