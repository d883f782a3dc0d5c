"""Check a tiny training engine of one rank in this process: its numbers, its memory and its reads from the device."""

import gc
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch

from engines.batch.batch import TrainBatch
from engines.batch.schedule import plan_schedule
from engines.batch.shard import Shard
from engines.config import MegatronConfig
from engines.megatron.engine import MegatronEngine
from engines.megatron.groups import init_distributed, leave_distributed
from engines.megatron.memory.activations import MicroBatch, count_kept
from engines.megatron.memory.estimate import compute_rank_memory
from engines.models.spec import ModelSpec
from engines.probes import megatron as probes
from engines.probes.host_reads import READS_OF_A_STEP, HostReads
from engines.probes.saved_bytes import SavedBytes, find_place
from rlworker.checks.case import Case, make_case
from rlworker.checks.device.report import Device, DeviceFinding
from rlworker.checks.reference.ensemble import Reference, compute_reference
from rlworker.checks.reference.huggingface import probe_loss
from rlworker.checks.tiny.models import LARGE_WEIGHTS, Tiny, make_tiny_model, make_tiny_text
from rlworker.checks.trainer import TRAINER_CHECKS, CheckedTrainer

TEXT_MODELS: tuple[Tiny, ...] = ("qwen2", "qwen3_moe", "qwen3_5_text")
IMAGE_MODELS: tuple[Tiny, ...] = ("qwen2_5_vl", "qwen3_vl", "gemma3")
"""Tiny models: attention alone, experts, layers with states; models that see images, which need torchvision."""
DTYPES = ("float32", "bfloat16")
PLAN_LIMITS = {"activations": 0.1, "peak": 0.15}
"""Largest relative difference between measured and planned activations, and largest relative excess of the measured
peak."""
_MB = 2**20


@contextmanager
def joined_process(device: Device) -> Iterator[None]:
    """Make this process a group of one rank in this context, so that engines can be built."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed(device.platform, MegatronConfig(), 0, f"127.0.0.1:{port}", seed=0)
    try:
        yield
    finally:
        gc.collect()
        leave_distributed()


def build_engine(device: Device, model: ModelSpec, config: MegatronConfig) -> MegatronEngine:
    """Build an engine of one rank on the device."""
    return MegatronEngine(model, config, device.platform, device.device)


def plan_shard(engine: MegatronEngine, batch: TrainBatch) -> Shard:
    """Return the shard of a batch for the only replica."""
    (shard,) = plan_schedule(batch.lengths, engine.config, engine.model.hidden, 1).shards(batch)
    return shard


# -- numbers


def check_engine(device: Device, folder: Path, own: Path | None = None) -> list[DeviceFinding]:
    """Check masks, layouts and gradients of models against HuggingFace, which computes on the CPU in fp64.

    Args:
        folder: folder for tiny models and images.
        own: HuggingFace folder of a model that is checked in place of the tiny ones.
    """
    findings: list[DeviceFinding] = []
    kinds = TEXT_MODELS + (IMAGE_MODELS if find_spec("torchvision") else ())
    # HuggingFace computes where nothing of torch is patched for Megatron.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        for kind in (own.resolve().name,) if own else kinds:
            model, case, references = process.submit(make_references, folder, kind, own).result()
            for dtype, reference in zip(DTYPES, references, strict=True):
                findings += _check_model(
                    device, model, case, reference, MegatronConfig(dtype=dtype, share="prompts"), kind
                )
    if not own and kinds == TEXT_MODELS:
        text = "not run: transformers' image processor needs torchvision; pip install torchvision"
        findings.append(device.refuse("engine images", ", ".join(IMAGE_MODELS), text))
    return findings


def make_references(folder: Path, kind: str, own: Path | None) -> tuple[ModelSpec, Case, list[Reference]]:
    """Read a model or make a tiny one, make its case, and compute HuggingFace's numbers for each dtype."""
    model = ModelSpec.from_folder(own or make_tiny_model(folder / kind, cast(Tiny, kind)))
    images = folder / f"{kind}_images"  # another kind may see a video where this one sees an image
    images.mkdir()
    case = make_case(model, 1, str(images))
    compute = partial(compute_reference, model, case.batch, probe_loss, case.denominator, 1.0)
    return model, case, [compute(getattr(torch, dtype)) for dtype in DTYPES]


def _check_model(
    device: Device, model: ModelSpec, case: Case, reference: Reference, config: MegatronConfig, kind: str
) -> list[DeviceFinding]:
    engine = build_engine(device, model, config)
    call_ranks = lambda function, *args: [getattr(probes, function)(engine, *args)]  # noqa: E731
    trainer = CheckedTrainer(device.platform.name, config, model, case, reference, call_ranks)
    findings = []
    for name, check in TRAINER_CHECKS.items():
        for finding in check(trainer):
            where = f"{kind}, {config.dtype}, {finding.where}"
            line = DeviceFinding(f"engine {name}", where, finding.outcome, finding.text, finding.evidence)
            findings.append(line)
    return findings


# -- memory and reads


def make_batch(model: ModelSpec, sequences: int, tokens: int) -> TrainBatch:
    """Make ``sequences`` sequences of ``tokens`` inputs each, in which every token counts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.vocab, (sequences, tokens + 1), generator=generator).tolist()
    batch = TrainBatch.from_ids(ids, [1] * sequences)
    return replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))


def measure_memory(device: Device, model: ModelSpec, config: MegatronConfig, sequences: int, tokens: int) -> dict:
    """Measure the memory of two training steps, each of one micro-batch, in bytes.

    Args:
        sequences, tokens: number of sequences, and tokens of each.

    Returns:
        on an accelerator ``peak``, beyond the workspaces of libraries, and ``planned peak``; on a CPU ``activations``
            (held by autograd) and ``planned activations``.
    """
    micro, kernels = MicroBatch(sequences * tokens, sequences), device.platform.kernel_memory
    held = 0 if device.is_host else count_libraries(device)
    engine = build_engine(device, model, config)
    shard = plan_shard(engine, make_batch(model, sequences, tokens))
    if device.is_host:
        saved = SavedBytes({find_place(parameter) for parameter in engine.module.parameters()})
        with saved.counting():
            engine.backward(shard, probe_loss, 1.0)
        planned = count_kept(model, config, 0, micro, kernels).most
        return {"activations": saved.most, "planned activations": planned}
    for _ in range(2):
        engine.train_step(shard, probe_loss, 1.0)
    peak = torch.get_device_module(device.device).max_memory_allocated() - held
    return {"peak": peak, "planned peak": compute_rank_memory(model, config, 0, 0, micro, kernels).total}


def count_libraries(device: Device) -> int:
    """Count the bytes that stay allocated whatever an engine does, such as cuBLAS's workspaces (64 MB on an H100), and
    reset the peak."""
    gc.collect()
    # A workspace belongs to a thread: the backward pass runs in a thread of its own.
    square = torch.ones(8, 8, device=device.device, requires_grad=True)
    (square @ square).sum().backward()
    module = torch.get_device_module(device.device)
    module.reset_peak_memory_stats()
    return module.memory_allocated()


def check_memory(device: Device, folder: Path) -> list[DeviceFinding]:
    """Compare the planned memory with the measured memory of a small model, with and without recomputation."""
    sizes: dict[str, Any] = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_hidden_layers=4)
    if device.is_host:
        sizes = {}
    model = ModelSpec.from_folder(make_tiny_text(folder / "memory", "qwen2", 1024, **LARGE_WEIGHTS, **sizes))
    sequences, tokens = (4, 64) if device.is_host else (16, 256)
    findings = []
    for dtype in DTYPES[:1] if device.is_host else DTYPES:  # an emulator keeps bf16 as it likes
        for recompute in ("none", "full"):
            config = MegatronConfig(dtype=dtype, recompute=recompute, micro_batch_tokens=sequences * tokens)
            figures = measure_memory(device, model, config, sequences, tokens)
            (name, measured), (_, planned) = figures.items()
            apart = measured / planned - 1
            passed = apart <= PLAN_LIMITS[name] and (name == "peak" or -apart <= PLAN_LIMITS[name])
            text = f"{name} {measured / _MB:.1f} MB, {apart:+.1%} of the planned {planned / _MB:.1f} MB"
            in_mb = {f"{key} MB": value / _MB for key, value in figures.items()}
            findings.append(device.make_finding("memory", f"{dtype}, recompute {recompute}", passed, text, in_mb))
    return findings


def check_reads(device: Device, folder: Path) -> list[DeviceFinding]:
    """Check that a training step reads device values only at the places in ``READS_OF_A_STEP``."""
    model = ModelSpec.from_folder(make_tiny_model(folder / "reads", "qwen2"))
    dtype = "float32" if device.is_host else "bfloat16"
    engine = build_engine(device, model, MegatronConfig(dtype=dtype))
    shard = plan_shard(engine, make_batch(model, 4, 16))
    engine.train_step(shard, probe_loss, 1.0)  # the first step allocates buffers that are allocated once
    with HostReads() as reads:
        engine.train_step(shard, probe_loss, 1.0)
    counts = reads.count()
    findings = []
    for place in sorted(counts.keys() | READS_OF_A_STEP.keys()):
        stated, count = READS_OF_A_STEP.get(place, "not on the list"), counts.get(place, 0)
        passed = place in READS_OF_A_STEP and count > 0
        findings.append(device.make_finding("reads", place, passed, f"{stated}: {count} times", {"reads": count}))
    return findings
