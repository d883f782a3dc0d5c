"""A critic that sees images against transformers' hidden states and a head by hand, one sequence at a time, in fp32."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cover import matrix
from support.factors import IMAGE_FAMILIES, LAYOUTS, parse_size
from support.huggingface import name_gradients
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, plan
from support.ranks.pool import draw_address
from support.ranks.vlm_cases import make_images, make_vlm_batch

from engines.models.spec import ModelSpec
from rlworker.checks.huggingface import load_huggingface, make_image_arguments

VALUES, GRADIENTS, OF_THE_LARGEST = 1e-5, 1e-6, 2e-6


def weigh(outputs, batch):
    """A loss whose gradient differs at each value."""
    loss = (outputs.values * batch.advantages * batch.mask).sum()
    return loss, {"loss": loss.detach()}


def run_critic(rank: int, world: int, address: str, folder: str, paths, settings: dict) -> dict:
    model = ModelSpec.from_folder(folder, head="value")
    engine = build_engine(rank, world, address, model, settings)
    from engines.probes.megatron import gather_gradients

    batch = make_vlm_batch(model, paths)
    schedule, shard = plan(engine, batch)
    values = engine.forward(shard)
    engine.backward(shard, weigh, float(batch.mask.sum()))
    gradients = gather_gradients(engine)
    mine = engine.is_leader
    return {
        "schedule": schedule,
        "dp_rank": engine.dp_rank,
        "values": values.values if mine else None,
        "gradients": gradients if mine else None,
    }


def make_critic(folder, family: str) -> str:
    """Save a critic: a model's body and a head that is no longer zero."""
    path = f"{make_vlm(folder, family)}/model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(3)
    model = ModelSpec.from_folder(folder)
    width = model.hidden
    del weights[model.family.output]
    weights["score.weight"] = 0.1 * torch.randn(1, width, generator=generator)
    weights["score.bias"] = torch.randn(1, generator=generator)
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


def compute_by_hand(folder: str, images) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values ``[N]`` and gradients by the names in the folder, from transformers' last hidden states."""
    spec, weights = ModelSpec.from_folder(folder), load_file(f"{folder}/model.safetensors")
    head = {name: weights[f"score.{name}"].clone().requires_grad_() for name in ("weight", "bias")}
    model, batch, see = load_huggingface(spec), make_vlm_batch(spec, images), make_image_arguments(spec)
    parts, loss = [], torch.zeros(())
    for i in range(len(batch)):
        one = batch.select(i, i + 1)
        hidden = model.model(one.inputs[None], **see(one)).last_hidden_state[0]
        parts.append((hidden @ head["weight"].T + head["bias"])[:, 0])
        loss = loss + (parts[-1] * one.advantages * one.mask).sum()
    (loss / batch.mask.sum()).backward()
    gradients = name_gradients(model, spec) | {f"score.{name}": tensor.grad for name, tensor in head.items()}
    return torch.cat(parts).detach(), gradients


@pytest.fixture(scope="module")
def critics(tmp_path_factory):
    images, made = make_images(tmp_path_factory.mktemp("images")), {}

    def make(family: str) -> tuple:
        if family not in made:
            folder = make_critic(tmp_path_factory.mktemp(family), family)
            made[family] = folder, images, *compute_by_hand(folder, images)
        return made[family]

    return make


@matrix({"size": ("one", "PP2"), "family": IMAGE_FAMILIES, "layout": LAYOUTS})
def test_parity(pool_of, critics, measured, size, family, layout):
    """A head is the text model's, and features of images the language head's, whose matrices have every size."""
    folder, images, want_values, want_gradients = critics(family)
    ranks = pool_of(size).run(run_critic, draw_address(), folder, images, parse_size(size) | {"layout": layout})
    (leader,) = [rank for rank in ranks if rank["values"] is not None]
    values = float((leader["schedule"].restore_order(leader["values"]) - want_values).abs().max())
    assert set(leader["gradients"]) == set(want_gradients)
    apart = {name: float((leader["gradients"][name] - want).abs().max()) for name, want in want_gradients.items()}
    worst, largest = max(apart, key=apart.get), max(float(x.abs().max()) for x in want_gradients.values())
    measured({"values": values, "gradients": apart[worst]})
    assert values <= VALUES and apart[worst] <= max(GRADIENTS, OF_THE_LARGEST * largest), worst
