"""What a vision-language model's engine keeps, and what it leaves alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.factors import IMAGE_FAMILIES, IMAGE_STATE_FAMILIES
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, plan
from support.ranks.pool import draw_address
from support.ranks.vlm_cases import make_images, make_vlm_batch, name_part, rename

from engines.config import MegatronConfig, OptimizerConfig
from engines.models.folders.hf_folder import save_hf_folder
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import probe_loss

PARTS = ("vision", "projector", "language")


def copy_weights(engine) -> dict[str, torch.Tensor]:
    """Copy all weights of an engine, by their HuggingFace names; a rank that is not to export them has none."""
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def run_steps(rank: int, world: int, address: str, folder: str, paths, settings: dict, out: str) -> dict:
    engine = build_engine(rank, world, address, folder, settings | {"optimizer": OptimizerConfig(lr=1e-3)})
    batch = make_vlm_batch(engine.model, paths)
    _, shard = plan(engine, batch)

    def step(engine) -> None:
        engine.train_step(shard, probe_loss, float(batch.mask.sum()))

    found = {"before": copy_weights(engine)}
    step(engine)
    found["first"] = copy_weights(engine)
    engine.save(out)
    save_hf_folder(engine.export_weights(), engine.model, f"{out}-hf", 200_000)
    step(engine)
    found["second"] = copy_weights(engine)
    again = build_engine(rank, world, address, folder, settings | {"optimizer": OptimizerConfig(lr=1e-3)})
    again.load(out)
    found["loaded"] = copy_weights(again)
    step(again)
    found["resumed"] = copy_weights(again)
    return found


def step_once(rank: int, world: int, address: str, folder: str, paths, settings: dict) -> dict:
    """One step: its gradient's norm, the weights before and after it, and how many moments the optimizer has."""
    engine = build_engine(rank, world, address, folder, settings | {"optimizer": OptimizerConfig(lr=1e-3)})
    batch = make_vlm_batch(engine.model, paths)
    _, shard = plan(engine, batch)
    found = {"before": copy_weights(engine)}
    found["norm"] = engine.train_step(shard, probe_loss, float(batch.mask.sum())).grad_norm
    found["after"] = copy_weights(engine)
    found["moments"] = sum(
        value.numel()
        for part in engine.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    return found


FROZEN = [
    ("qwen3_vl", ("language",)),
    ("gemma3", ("vision", "projector")),
    ("internvl", ("vision",)),
    ("gemma3", ("projector", "language")),
]
"""Families with each kind of tower. The matrix of parity has the gradients of the others."""


@pytest.mark.parametrize(("family", "frozen"), FROZEN)
def test_frozen_parts_do_not_move_and_have_no_moments(one_rank, tmp_path, family, frozen):
    folder, paths = make_vlm(tmp_path / "model", family), make_images(tmp_path)
    (found,) = one_rank.run(step_once, draw_address(), folder, paths, {"freeze": frozen})
    learning = 0
    for name, tensor in found["before"].items():
        moved = not torch.equal(tensor, found["after"][name])
        assert moved == (name_part(name) not in frozen), name
        learning += tensor.numel() * (name_part(name) not in frozen)
    assert found["moments"] == 2 * learning
    assert found["norm"] > 0


RESUMED = {"TP2": {"tp": 2}, "PP2": {"pp": 2}, "CP2": {"cp": 2, "freeze": ("vision",)}}
MARKS = dict.fromkeys([("gemma3", "TP2"), ("qwen3_vl", "PP2")], ())
MARKS |= dict.fromkeys([("qwen2_5_vl", "CP2"), ("internvl", "PP2"), ("qwen3_5", "CP2")], pytest.mark.large)
MARKS |= {("qwen3_5_moe", "TP2"): pytest.mark.large}
"""Those that CI runs have each size and six families."""


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(*pair, id="-".join(pair), marks=MARKS.get(pair, pytest.mark.product))
        for pair in itertools.product(IMAGE_FAMILIES + IMAGE_STATE_FAMILIES, RESUMED)
    ],
)
def test_saved_and_gone_on_from(two_ranks, tmp_path, family, size):
    settings = RESUMED[size]
    folder, paths = make_vlm(tmp_path / "model", family, tied=True), make_images(tmp_path)
    (tmp_path / "out").mkdir()
    args = folder, paths, settings, str(tmp_path / "out")
    found = next(rank for rank in two_ranks.run(run_steps, draw_address(), *args) if rank["before"])
    for name in found["first"]:
        assert torch.equal(found["loaded"][name], found["first"][name]), name
        assert torch.equal(found["resumed"][name], found["second"][name]), name
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(f"{tmp_path / 'out'}-hf")
    renamed = {rename(name): parameter for name, parameter in hf.named_parameters()}
    for name, tensor in found["first"].items():
        assert torch.equal(renamed[rename(name)], tensor), name


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("leaves nothing to learn", {"freeze": PARTS}),
        ("leaves stages of pp=2 nothing to learn", {"freeze": ("language",), "pp": 2}),
        ("set --actor.pp 2", {"pp": 4}),  # four layers, of which the first two take image features
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, text, settings):
    model = ModelSpec.from_folder(make_vlm(tmp_path, "qwen3_vl"))
    with pytest.raises(ValueError, match=text):
        MegatronConfig(ranks=4, **settings).check_model(model)
    shallow = replace(model, layers=1)
    with pytest.raises(ValueError, match="the model has fewer layers than that"):
        MegatronConfig().check_model(shallow)


def test_a_critics_head_learns_where_the_language_model_is_frozen(tmp_path):
    """It is new, and zero: where it stays so, the tower that does learn has no gradient either."""
    folder, config = make_vlm(tmp_path, "qwen2_5_vl"), MegatronConfig(freeze=("language", "vision", "projector"))
    config.check_model(critic := ModelSpec.from_folder(folder, head="value"))
    learned = {
        n
        for weight in critic.weights.values()
        if not config.freezes(weight.part, weight.is_head)
        for n in weight.tensors
    }
    assert learned == {"score.weight", "score.bias"}
    with pytest.raises(ValueError, match="leaves nothing to learn"):
        config.check_model(ModelSpec.from_folder(folder))


def test_a_text_model_has_no_parts_to_freeze(make_hf_model):
    with pytest.raises(ValueError, match="names parts of models with vision, and this is none; leave"):
        MegatronConfig(freeze=("vision",)).check_model(ModelSpec.from_folder(make_hf_model("qwen2", True)))


def kept_by_the_tower(rank: int, world: int, address: str, folder: str, paths, recompute: str) -> int:
    engine = build_engine(rank, world, address, folder, {"recompute": recompute})
    images = [image for own in make_vlm_batch(engine.model, paths).images for image in own]
    kept = []
    engine.module.train()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x):
        engine.extensions["vision"].see(images)
    return sum(kept)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "internvl"])  # of each kind of tower
def test_a_recomputed_tower_keeps_the_inputs_of_its_blocks_alone(one_rank, tmp_path, family):
    folder, paths = make_vlm(tmp_path / "model", family), make_images(tmp_path)
    (whole,), (few,) = (
        one_rank.run(kept_by_the_tower, draw_address(), folder, paths, recompute) for recompute in ("none", "full")
    )
    assert few < 0.6 * whole, "what is left is mostly the projector's"


def go_on_otherwise(rank: int, world: int, address: str, folder: str, paths, out: str, settings: dict, save: bool):
    """A step and a checkpoint at one size; or the checkpoint and the step after it at another."""
    optimizer = OptimizerConfig(lr=1e-3, adam_eps=1e-5)
    engine = build_engine(rank, world, address, folder, settings | {"optimizer": optimizer})
    batch = make_vlm_batch(engine.model, paths)
    _, shard = plan(engine, batch)
    if not save:
        engine.load(out)
    engine.train_step(shard, probe_loss, float(batch.mask.sum()))
    if save:
        engine.save(out)
        engine.train_step(shard, probe_loss, float(batch.mask.sum()))
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.large) for name in ("qwen2_5_vl", "gemma3", "qwen3_5"))],
)
def test_gone_on_from_at_another_size(two_ranks, tmp_path, family):
    folder, paths = make_vlm(tmp_path / "model", family, tied=True), make_images(tmp_path)
    (tmp_path / "out").mkdir()
    found = []
    for settings, save in (({"tp": 2}, True), ({"pp": 2}, False), ({"cp": 2}, False)):
        args = folder, paths, str(tmp_path / "out"), settings, save
        found.append(next(weights for weights in two_ranks.run(go_on_otherwise, draw_address(), *args) if weights))
    for name, straight in found[0].items():
        for other in found[1:]:
            assert float((other[name] - straight).abs().max()) <= 2e-6, name
