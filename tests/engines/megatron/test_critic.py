"""A critic against HuggingFace's token classification, one sequence at a time, in fp32."""

from functools import partial

import pytest
import torch
from safetensors import safe_open
from support.cover import in_runs, matrix
from support.factors import FOUR_RANKS, IMAGE_FAMILIES, LAYOUTS, RECOMPUTE, TWO_RANKS, parse_size
from support.huggingface import name_gradients
from support.models import make_vlm
from support.ranks.critic_cases import check_critic, run_beside_actor, run_critic
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address
from support.ranks.shared_cases import compute_logits
from support.ranks.vlm_cases import make_images
from support.rounding import Draw, measure_rounding

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, ValueOutputs, list_columns
from engines.config import LoraConfig, OptimizerConfig
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface

FAMILIES = ("llama", "qwen3")
"""Some of those of which transformers has a token classification; the other tests of critics run qwen2."""


def make_value_batch(model=None):
    """The usual awkward sequences with returns to learn from."""
    batch = make_batch()
    returns = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
    return TrainBatch(lengths=batch.lengths, **batch.columns() | {"returns": returns})


def squared(outputs, batch):
    loss = ((outputs.values - batch.returns).square() * batch.mask).sum() / 2
    return loss, {"loss": loss.detach()}


def compute_values(draw: Draw, folder: str) -> dict:
    spec, batch = ModelSpec.from_folder(folder, head="value"), make_value_batch()
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        values = compute_logits(draw, model, batch)[:, 0]
        loss, _ = squared(ValueOutputs(values), batch)
        (loss / batch.mask.sum()).backward()
        return {"values": values, "gradients": name_gradients(model, spec)}


@matrix(
    {"size": (*TWO_RANKS, "TP2-PP2", "TP2-CP2"), "family": FAMILIES, "layout": LAYOUTS, "recompute": RECOMPUTE},
    # The matrix of language models has what a family's layers compute; ranks share out the head alike in all families.
    heavy=lambda case: case["size"] in FOUR_RANKS or (case["size"] != "TP2" and case["family"] != FAMILIES[0]),
)
def test_parity(pool_of, make_critic, measured, size, family, layout, recompute):
    settings = parse_size(size) | {"layout": layout, "recompute": recompute}
    if "PP" in size:
        settings["micro_batch_tokens"] = 24
    folder = make_critic(family)
    ranks = pool_of(size).run(run_critic, draw_address(), folder, settings, make_value_batch, squared)
    check_critic(ranks, measure_rounding(compute_values, folder), measured, f"{family} {settings}")


def test_from_a_language_model_it_starts_with_a_head_of_zeros(two_ranks, make_hf_model, tmp_path):
    """The body is the language model's, every value is 0, and what is saved is read by HuggingFace and by us."""
    folder, target = make_hf_model("qwen2", True), str(tmp_path / "saved")
    case = {"tp": 2}, make_value_batch, squared
    ranks = two_ranks.run(run_critic, draw_address(), folder, *case, target)
    assert all(not rank["values"].any() for rank in ranks if rank["values"] is not None)
    from transformers import AutoModelForTokenClassification

    saved, loading = AutoModelForTokenClassification.from_pretrained(target, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    with safe_open(f"{folder}/model.safetensors", "pt") as start:
        assert torch.equal(
            saved.model.layers[3].mlp.down_proj.weight, start.get_tensor("model.layers.3.mlp.down_proj.weight")
        )
    assert saved.score.weight.shape == (1, 128) and not saved.score.weight.any()
    again = two_ranks.run(run_critic, draw_address(), target, *case)
    assert all(not rank["values"].any() for rank in again if rank["values"] is not None)


@pytest.mark.parametrize(("before", "after", "steps"), [({}, {}, 0), ({"tp": 2}, {}, 1), ({}, {"pp": 2}, 1)], ids=str)
def test_a_checkpoint_holds_the_head(two_ranks, make_critic, tmp_path, before, after, steps):
    """Also before the first step, as an actor is saved whose critic still warms up."""

    def run(rank, world, first, second, folder, target):
        model, batch = ModelSpec.from_folder(folder, head="value"), make_value_batch()
        engine = build_engine(rank, world, first, model, before | {"optimizer": OptimizerConfig(lr=1e-2)})
        _, shard = plan(engine, batch)
        for _ in range(steps):
            engine.train_step(shard, squared, float(batch.mask.sum()))
        engine.save(target)
        trained = {name: tensor.clone() for name, tensor in engine.export_weights()}
        engine = build_engine(rank, world, second, model, after | {"optimizer": OptimizerConfig(lr=1e-2)})
        engine.load(target)
        loaded = {name: tensor.clone() for name, tensor in engine.export_weights()}
        return trained, loaded

    folder = make_critic("qwen2")
    results = two_ranks.run(run, draw_address(), draw_address(), folder, str(tmp_path))
    trained, loaded = (next(r[i] for r in results if r[i]) for i in (0, 1))
    assert "score.weight" in trained and all(torch.equal(trained[name], loaded[name]) for name in trained)


@pytest.mark.parametrize(
    ("size", "family", "lora", "settings"),
    in_runs(
        default=[("one", "qwen2", LoraConfig(rank=4), {})],
        large=[
            ("TP2", "qwen3", LoraConfig(rank=4), {"dtype": "bfloat16", "recompute": "full"}),
            ("PP2", "gemma3_text", LoraConfig(rank=4), {"layout": "bshd"}),
            ("DP2-EP2", "qwen3_moe", LoraConfig(rank=4, targets=("attention", "experts")), {}),
            ("TP2", "qwen2_5_vl", LoraConfig(rank=4, targets=("attention", "vision")), {}),
        ],
        product=[
            ("CP2", "qwen2", LoraConfig(rank=4), {}),
            ("TP2-EP2", "glm4_moe", LoraConfig(rank=4, targets=("attention",)), {}),
            ("TP2", "qwen3_5_text", LoraConfig(rank=4), {}),
            ("PP2", "gemma3", LoraConfig(rank=4), {"recompute": "full"}),
            ("one", "internvl", LoraConfig(rank=4), {}),
        ],
    ),
)
def test_beside_adapters_the_base_is_held_once(
    pool_of, make_hf_model, measured, tmp_path, size, family, lora, settings
):
    """A critic that shares the actor's base computes bit for bit what one with a copy of it does, and what leaves the
    device comes back for both. While it is built few of its parameters are there at once."""
    images = tuple(make_images(tmp_path)) if family in IMAGE_FAMILIES else ()
    folder = make_vlm(tmp_path / "model", family) if images else make_hf_model(family, family == "qwen2")
    settings = parse_size(size) | settings | {"lora": lora}
    ranks = pool_of(size).run(run_beside_actor, draw_address(), folder, settings, images)
    for shared, own in ranks:
        assert len(shared["numbers"]) == len(own["numbers"]) == 11
        for mine, other in zip(shared["numbers"], own["numbers"], strict=True):
            assert_equal(mine, other)
        saved = own["bytes"] - shared["bytes"]
        measured({"bytes": shared["bytes"], "saved": saved, "most": shared["most"]})
        assert saved == own["planned"] - shared["planned"] > 0
        assert shared["most"] < 0.5 * own["most"], "a module's parameters leave as soon as they are registered"


def assert_equal(mine, other) -> None:
    """Assert that outputs, norms or weights by name are the same numbers."""
    if isinstance(mine, ValueOutputs | TokenOutputs):
        mine, other = list_columns(mine), list_columns(other)
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    else:
        assert mine == other and (mine is None or mine > 0)
