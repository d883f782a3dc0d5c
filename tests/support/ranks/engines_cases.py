"""Ranks of the Megatron tests run these functions, which every process imports from here."""

import gc
from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from support.huggingface import name_gradients, name_weights, run_forward, take_steps
from support.rounding import Draw

from engines.batch.batch import TrainBatch
from engines.batch.beginnings import find_beginnings
from engines.batch.schedule import plan_schedule
from engines.config import MegatronConfig, OptimizerConfig
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from rlworker.checks.reference.huggingface import load_huggingface, probe_loss

LENGTHS = (13, 2, 5, 30, 1, 9, 6, 21, 4)
"""Ids per sequence: one with a single input and one with none, no two alike, and an odd count of inputs at the end, so
that alignment pads after the last one too."""
STEPS = 3
"""Optimizer steps after which weights are compared."""
OPTIMIZER = OptimizerConfig(lr=5e-4, adam_eps=1e-5, clip_grad=0.5)


def start_process(rank: int, name: str = "cpu"):
    """Return platform and device; Megatron is imported and patched once per process."""

    platform = get_platform(name)
    if name.endswith("-emulated"):  # in a pool that has started as another platform too: beyond that it adds operators
        import_module(f"hardware.{name.removesuffix('-emulated')}.emulator.operator").install()
    if not getattr(start_process, "done", False):
        import warnings

        warnings.filterwarnings("ignore")
        platform.init_process(rank)
        start_process.done = True
    return platform


def join_group(rank: int, world: int, address: str):
    """Make a plain process group over all ranks, in place of whatever was there."""
    leave_groups()
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
    return dist.group.WORLD


def leave_groups() -> None:
    """Take down every process group of this process, and end their threads."""

    if dist.is_initialized():
        from engines.megatron.groups import leave_distributed

        leave_distributed()
        gc.collect()  # the engine before is a cycle that holds them: hundreds of gloo threads would wake up for ever
    build_engine.sizes = None


def build_engine(rank: int, world: int, address: str, model, settings: dict, platform: str = "cpu", **options):
    """Build a fresh engine of a ModelSpec, or of the language model in a folder.

    The parallel groups of the engine before it are kept where they are of the same sizes.
    """
    platform = start_process(rank, platform)

    from engines.megatron.engine import MegatronEngine
    from engines.megatron.groups import init_distributed

    config = MegatronConfig(ranks=world, timeout_s=60, **settings)
    sizes = (config.tp, config.pp, config.cp, config.ep, config.etp)
    if sizes != getattr(build_engine, "sizes", None):
        leave_groups()
        init_distributed(platform, config, rank, address, seed=7)
        build_engine.sizes = sizes
    model = model if isinstance(model, ModelSpec) else ModelSpec.from_folder(model)
    return MegatronEngine(model, config, platform, torch.device("cpu"), **options)


def make_batch(seed: int = 1, vocab: int = 99):
    """Make sequences of ``LENGTHS`` random ids with prompts of one to three, and advantages of both signs."""

    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    batch = TrainBatch.from_ids(sequences, [max(1, min(1 + i % 3, len(s) - 1)) for i, s in enumerate(sequences)])
    advantages = torch.randn(batch.num_tokens, generator=generator)
    return TrainBatch(lengths=batch.lengths, **batch.columns() | {"advantages": advantages})


def plan(engine, batch):
    """Return the schedule of a batch over an engine's replicas, and this replica's shard."""
    whole_images = any(rule.images for rule in engine.model.rules)
    found = find_beginnings(batch, engine.config, engine.platform, whole_images)
    schedule = plan_schedule(batch.lengths, engine.config, engine.model.hidden, engine.dp_size, beginnings=found)
    return schedule, schedule.shards(batch)[engine.dp_rank]


def gather_logits(engine, shard):
    """Gather the logits ``[N, vocab]`` of this replica's shard from every rank, by the engine's own packing."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    parts = []

    def forward_step(micro_batches, module):
        micro = next(micro_batches)
        layout = engine.layout(micro.lengths)

        def keep(hidden):
            if engine.transformer.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden)
            logits = hidden.transpose(0, 1) @ engine.module.module.output_weight.T
            full_logits = gather_from_tensor_model_parallel_region(logits)
            parts.append(layout.unpack(full_logits, mpu.get_context_parallel_group())[:, : engine.model.vocab])
            return logits.sum(), torch.tensor(0), {}

        return engine.forward_micro_batch(module, micro, layout), keep

    micro_batches = shard.micro_batches()
    engine.module.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=engine.module,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )
    return torch.cat(parts[: len(shard.counts)]) if engine.is_leader else None


def run_case(rank: int, world: int, address: str, folder: str, settings: dict, platform: str = "cpu") -> dict:
    """Compute logits, logprobs, gradients and weights of one parallel configuration, to compare with HuggingFace."""

    engine = build_engine(rank, world, address, folder, settings | {"optimizer": OPTIMIZER}, platform)
    from engines.probes.megatron import gather_gradients

    batch = make_batch()
    schedule, shard = plan(engine, batch)
    denominator = float(batch.mask.sum())
    outputs = engine.forward(shard)
    logits = gather_logits(engine, shard)
    gradients, optimizer_step = [], engine.optimizer.step

    def take_watched_step():
        gradients.append(gather_gradients(engine) if not gradients else None)
        return optimizer_step()

    engine.optimizer.step = take_watched_step  # gradients are clipped in place by the step, so they are read before it
    results = [engine.train_step(shard, probe_loss, denominator) for _ in range(STEPS)]
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    return {
        "schedule": schedule,
        "dp_rank": engine.dp_rank,
        "is_leader": engine.is_leader,
        "outputs": outputs,
        "logits": logits,
        "gradients": gradients[0],
        "weights": weights,
        "grad_norms": [r.grad_norm for r in results],
        "routing": results[0].routing,
        "step_logprobs": results[0].outputs.logprobs if engine.is_leader else torch.empty(0),
    }


def compute_steps(draw: Draw, folder: str) -> dict:
    """Compute by HuggingFace what ``run_case`` does: outputs and gradients of the first step, and the last weights."""
    spec, batch = ModelSpec.from_folder(folder), make_batch()
    result, norms = {}, []
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        counts = count_choices(model) if draw.is_truth else []
        run = partial(run_forward, model, spec, batch, probe_loss, at_once=draw.at_once)
        for found, norm in take_steps(run, model.parameters(), batch.mask.sum(), OPTIMIZER, STEPS):
            result = result or {
                "loads": {str(layer): tokens / tokens.mean() for layer, tokens in enumerate(counts)},
                "logits": found.logits.detach(),
                "logprobs": found.outputs.logprobs.detach() * batch.mask,
                "entropy": found.outputs.entropy.detach() * batch.mask,
                "gradients": {name: gradient.clone() for name, gradient in name_gradients(model, spec).items()},
            }
            norms.append(norm)
    return result | {"norms": torch.stack(norms), "weights": name_weights(model, spec)}


def compute_weights(draw: Draw, folder: str, batches: Sequence[TrainBatch], optimizer: OptimizerConfig) -> dict:
    """Compute by HuggingFace the weights after a step for each batch, all at the optimizer's full rate."""
    spec, tokens = ModelSpec.from_folder(folder), batches[0].mask.sum()
    assert all(batch.mask.sum() == tokens for batch in batches)
    turns = iter(batches)
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        run = lambda: run_forward(model, spec, next(turns), probe_loss, at_once=draw.at_once)  # noqa: E731
        for _ in take_steps(run, model.parameters(), tokens, optimizer, len(batches)):
            pass
        return {"weights": name_weights(model, spec)}


def count_choices(model) -> list[torch.Tensor]:
    """Tokens ``[experts]`` that chose each expert, of each layer that has some; forward passes add to them."""
    experts = {name: x for name, x in model.named_modules() if name.endswith(".mlp.experts")}
    counts = {name: torch.zeros(x.num_experts) for name, x in experts.items()}

    def watch(name: str, _, inputs: tuple[torch.Tensor, ...]) -> None:
        chosen = inputs[1]  # beside hidden states and weights
        counts[name] += chosen.flatten().bincount(minlength=len(counts[name]))

    for name, module in experts.items():
        module.register_forward_pre_hook(partial(watch, name))
    return list(counts.values())
