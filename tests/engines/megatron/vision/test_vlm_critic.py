"""A critic that sees images against transformers' hidden states and a head by hand, one sequence at a time, in fp32."""

from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cover import matrix
from support.factors import IMAGE_FAMILIES, IMAGE_STATE_FAMILIES, LAYOUTS, parse_size
from support.huggingface import name_gradients
from support.models import make_vlm
from support.ranks.critic_cases import check_critic, run_critic
from support.ranks.pool import draw_address
from support.ranks.shared_cases import value_loss
from support.ranks.vlm_cases import make_images, make_vlm_batch
from support.rounding import Draw, measure_rounding

from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface, open_images


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


def compute_by_hand(draw: Draw, folder: str, images) -> dict:
    """Values ``[N]`` and gradients by the names in the folder, from transformers' last hidden states."""
    spec, weights = ModelSpec.from_folder(folder), load_file(f"{folder}/model.safetensors")
    batch = make_vlm_batch(spec, images)
    see = open_images(spec, batch, draw.dtype)
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        head = draw.load(partial(load_head, weights))
        parts, loss = [], torch.zeros(())
        for i in range(len(batch)):
            one = batch.select(i, i + 1)
            hidden = model.model(one.inputs[None], **see(one)).last_hidden_state[0]
            parts.append(head(hidden)[:, 0])
            loss = loss + (parts[-1] * one.advantages * one.mask).sum()
        (loss / batch.mask.sum()).backward()
        gradients = {f"score.{name}": parameter.grad for name, parameter in head.named_parameters()}
        return {"values": torch.cat(parts), "gradients": name_gradients(model, spec) | gradients}


def load_head(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.nn.Linear:
    weight, bias = (weights[f"score.{name}"] for name in ("weight", "bias"))
    head = torch.nn.Linear(weight.shape[1], 1, dtype=dtype)
    head.load_state_dict({"weight": weight, "bias": bias})
    return head


@pytest.fixture(scope="module")
def critics(tmp_path_factory):
    images, made = make_images(tmp_path_factory.mktemp("images")), {}

    def make(family: str) -> tuple:
        if family not in made:
            folder = make_critic(tmp_path_factory.mktemp(family), family)
            made[family] = folder, images, measure_rounding(compute_by_hand, folder, images)
        return made[family]

    return make


@pytest.mark.large
@pytest.mark.parametrize(("family", "layout"), product(IMAGE_STATE_FAMILIES, LAYOUTS))
def test_states(pool_of, critics, measured, family, layout):
    test_parity(pool_of, critics, measured, "PP2", family, layout)


@matrix({"size": ("one", "PP2"), "family": IMAGE_FAMILIES, "layout": LAYOUTS})
def test_parity(pool_of, critics, measured, size, family, layout):
    """A head is the text model's, and features of images the language head's, whose matrices have every size."""
    folder, images, want = critics(family)
    settings, make = parse_size(size) | {"layout": layout}, partial(make_vlm_batch, paths=images)
    ranks = pool_of(size).run(run_critic, draw_address(), folder, settings, make, value_loss)
    check_critic(ranks, want, measured, f"{size} {family} {layout}")
