"""Ranks of the tests of adapters run these functions, and PEFT's model beside them computes the same."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from support.huggingface import name_weights, run_forward, take_steps
from support.ranks.engines_cases import STEPS, build_engine, gather_logits, make_batch, plan
from support.ranks.vlm_cases import make_vlm_batch
from support.rounding import Draw

from engines.batch.batch import TrainBatch
from engines.config import LoraConfig, OptimizerConfig
from engines.models.adapters import ExpertAdapter
from engines.models.spec import ModelSpec
from engines.weight_digest import DigestPlan
from rlworker.checks.reference.huggingface import load_huggingface, open_images, probe_loss

OPTIMIZER = OptimizerConfig(lr=5e-4, adam_eps=1e-4, clip_grad=0.5)
"""A step moves an entry by at most lr / eps = 5 times the difference of its gradient."""


def draw_adapters(shapes: dict[str, tuple[int, ...]], seed: int = 5) -> dict[str, torch.Tensor]:
    """Draw adapters by PEFT's names, of which neither A nor B is zero."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.03 for name, shape in sorted(shapes.items())}


def list_shapes(model: ModelSpec, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    return {name: shape for adapter in lora.list_adapters(model) for name, shape in adapter.tensors.items()}


def draw_batch(model: ModelSpec, images: list[str]) -> TrainBatch:
    return make_vlm_batch(model, images) if model.vision else make_batch()


def run_adapter_case(
    rank: int,
    world: int,
    address: str,
    folder: str,
    settings: dict,
    platform: str = "cpu",
    images: tuple[str, ...] = (),
) -> dict:
    """Compute what adapters change: logits, their gradients, their values after some steps, and merged weights."""
    engine = build_engine(rank, world, address, folder, settings | {"optimizer": OPTIMIZER}, platform)
    from engines.probes.megatron import gather_adapter_gradients

    batch = draw_batch(engine.model, images)
    schedule, shard = plan(engine, batch)
    fill(engine)
    logits, merged = gather_logits(engine, shard), {n: t.clone() for n, t in engine.export_weights()}
    gradients, optimizer_step = [], engine.optimizer.step

    def take_watched_step():
        gradients.append(None if gradients else gather_adapter_gradients(engine))
        return optimizer_step()

    engine.optimizer.step = take_watched_step  # gradients are clipped in place by the step, so they are read before it
    results = [engine.train_step(shard, probe_loss, float(batch.mask.sum())) for _ in range(STEPS)]
    return {
        "schedule": schedule,
        "dp_rank": engine.dp_rank,
        "is_leader": engine.is_leader,
        "logits": logits,
        "gradients": gradients[0],
        "adapters": {name: tensor.clone() for name, tensor in engine.extensions["adapters"].export()},
        "merged": merged,
        "grad_norms": [result.grad_norm for result in results],
    }


def fill(engine, seed: int = 5) -> None:
    engine.extensions["adapters"].fill(draw_adapters(list_shapes(engine.model, engine.config.lora), seed))


def run_view(rank: int, world: int, address: str, folder: str, settings: dict) -> dict:
    """Compute logprobs of the actor, of its view without adapters, and of a second engine without any."""
    engine = build_engine(rank, world, address, folder, settings)
    from engines.megatron.extensions.adapters import BaseView

    fill(engine)
    _, shard = plan(engine, make_batch())
    view, parts = BaseView(engine), {"learning": {n for n, p in engine.decoder.named_parameters() if p.requires_grad}}
    buffers = [buffer.grad_data.numel() for buffer in engine.module.buffers]
    parts |= {"actor": engine.forward(shard), "view": view.forward(shard), "again": engine.forward(shard)}
    frozen = {name: value for name, value in settings.items() if name != "lora"}
    second = build_engine(rank, world, address, folder, frozen, trainable=False)
    return parts | {"second": second.forward(shard), "gradients": sum(buffers)}


def run_steps(rank: int, world: int, address: str, folder: str, settings: dict, saved: tuple[str, str, int]) -> dict:
    """Load a checkpoint of the adapters, take steps, save another; an empty name leaves either out."""
    engine = build_engine(rank, world, address, folder, {"optimizer": OPTIMIZER} | settings)
    source, target, steps = saved
    _, shard = plan(engine, batch := make_batch())
    if source:
        engine.load(source)
    else:
        fill(engine)
    norms = [engine.train_step(shard, probe_loss, float(batch.mask.sum())).grad_norm for _ in range(steps)]
    if target:
        engine.save(target)
    return {
        "norms": norms,
        "adapters": {name: tensor.clone() for name, tensor in engine.extensions["adapters"].export()},
        "merged": {name: tensor.clone() for name, tensor in engine.export_weights()},
    }


def find_frozen(rank: int, world: int, address: str, folder: str, settings: dict) -> dict[str, list[str]]:
    """List frozen weights before an update, after it, and where adapters are left out of what is sent."""
    engine = build_engine(rank, world, address, folder, settings | {"optimizer": replace(OPTIMIZER, lr=1e-4)})
    from engines.megatron.extensions.adapters import list_frozen
    from engines.probes.faults import mend, plant

    def send(seed: int) -> list[str]:
        plan, sent = DigestPlan(settings["dtype"], columns=4, seed=seed), {}
        for _ in plan.digest(engine.export_weights(), sent):
            pass
        return list_frozen(engine, plan, sent)

    _, shard = plan(engine, batch := make_batch())
    found = {"before": send(1)}
    engine.train_step(shard, probe_loss, float(batch.mask.sum()))
    found |= {"after": send(2)}
    plant(engine, "frozen weights")
    found |= {"planted": [name for seed in (3, 4) for name in send(seed)]}
    mend(engine)
    return found | {"mended": send(5)}


def write_folder(rank: int, world: int, address: str, folder: str, settings: dict, target: str) -> list[str]:
    """Write the adapters of a new engine as PEFT does; returns the names of the files on the rank that wrote them."""
    engine = build_engine(rank, world, address, folder, settings)
    from engines.megatron.extensions.adapters import save_adapters

    return save_adapters(engine, target)


def load_peft(
    spec: ModelSpec,
    lora: LoraConfig,
    adapters: dict[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
):
    """Load transformers' model with PEFT's adapters, filled as the ranks' are."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, set_peft_model_state_dict

    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in list_shapes(spec, lora)}
    grouped = sorted({one.parameter for one in lora.list_adapters(spec) if isinstance(one, ExpertAdapter)})
    names = {name for name in names if not grouped or not name.removesuffix(".base_layer").endswith(".mlp.experts")}
    names = sorted(names if spec.vision else {name.rpartition(".")[2] for name in names})
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.scaling == "rslora"}
    settings |= {"target_parameters": grouped} if grouped else {}
    model = get_peft_model(load_huggingface(spec, dtype), PeftConfig(target_modules=names, **settings))
    result = set_peft_model_state_dict(model, adapters or draw_adapters(list_shapes(spec, lora)))
    assert not result.unexpected_keys and not any("lora" in name for name in result.missing_keys)
    return model


def name_peft(model, value_of) -> dict[str, torch.Tensor]:
    """Map names in PEFT's folder to what ``value_of`` takes of the parameters."""
    found = {name: value_of(p) for name, p in model.named_parameters() if p.requires_grad}
    return {name.replace(".default.", "."): value.detach().clone() for name, value in found.items()}


def compute_peft(draw: Draw, folder: str, lora: LoraConfig, images: tuple[str, ...] = ()) -> dict:
    """Compute by PEFT what ``run_adapter_case`` does, one sequence at a time."""
    spec = ModelSpec.from_folder(folder)
    batch, values = draw_batch(spec, images), draw_adapters(list_shapes(spec, lora))
    see, result, norms = open_images(spec, batch, draw.dtype), {}, []
    with draw.computing():
        model = draw.load(partial(load_peft, spec, lora, values))
        merged = deepcopy(model).merge_and_unload()
        at_once = draw.at_once and not spec.vision
        run = partial(run_forward, model, spec, batch, probe_loss, arguments=see, at_once=at_once)
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for found, norm in take_steps(run, learning, batch.mask.sum(), OPTIMIZER, STEPS):
            result = result or {"logits": found.logits.detach(), "gradients": name_peft(model, lambda p: p.grad)}
            norms.append(norm)
        result |= {"norms": torch.stack(norms), "adapters": name_peft(model, lambda p: p)}
        return result | {"merged": name_weights(merged, spec)}
