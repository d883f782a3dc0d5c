"""Routers in an engine: one that is frozen, and biases that move, travel and stay in fp32."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.cover import in_runs
from support.factors import count_ranks, parse_size
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from engines.config import MegatronConfig, OptimizerConfig
from engines.models.folders.hf_folder import save_hf_folder
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import probe_loss

RATE = 0.02
PLAIN = {"optimizer": OptimizerConfig(lr=1e-3, adam_eps=1e-5, clip_grad=0.0)}


def step(rank: int, world: int, address: str, folder: str, settings: dict, scale: float = 1.0) -> dict:
    """Gradients of a step and the weights after it; tokens that chose each expert, of each layer of the stage."""
    engine = build_engine(rank, world, address, folder, PLAIN | settings)
    from engines.probes.megatron import gather_gradients

    batch, gradients, take_step = make_batch(), {}, engine.optimizer.step

    def take_watched_step():
        gradients.update(gather_gradients(engine))
        return take_step()

    engine.optimizer.step = take_watched_step
    loss = lambda outputs, micro: (scale * probe_loss(outputs, micro)[0], {})  # noqa: E731
    engine.train_step(plan(engine, batch)[1], loss, float(batch.mask.sum()))
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    return {
        "gradients": gradients,
        "weights": weights,
        "loads": [router.load.tolist() for router in engine.extensions["experts"].routers.layers],
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_frozen_router_stays_and_the_rest_learns_as_before(one_rank, make_hf_model, family):
    folder = make_hf_model(family, False)
    spec, before = ModelSpec.from_folder(folder), load_file(f"{folder}/model.safetensors")
    free, frozen = (one_rank.run(step, draw_address(), folder, {"freeze": freeze})[0] for freeze in ((), ("router",)))
    routers = {name for name in before if spec.find_part(name) == "router"}
    assert {name.split(".mlp.")[1] for name in routers} == {"gate.weight", *("gate." + n for n in buffer_names(spec))}
    for name in before:
        same, is_buffer = torch.equal(frozen["weights"][name], before[name]), name in spec.buffers
        assert same == (name in routers), name
        assert torch.equal(free["weights"][name], before[name]) == is_buffer, name
        if name not in routers:
            assert torch.equal(frozen["gradients"][name], free["gradients"][name]), name
        elif not is_buffer:
            assert frozen["gradients"][name].abs().max() == 0 < free["gradients"][name].abs().max()


def buffer_names(spec: ModelSpec) -> set[str]:
    return {name.rpartition(".")[2] for name in spec.buffers}


def read_biases(weights: dict) -> torch.Tensor:
    return torch.stack([tensor for name, tensor in sorted(weights.items()) if name.endswith("correction_bias")])


def test_biases_move_by_the_load_of_the_step(one_rank, make_hf_model):
    """After a step that is taken, by the tokens that it learned from; gradients are those of biases that stay."""
    folder = make_hf_model("glm4_moe", False)
    before = load_file(f"{folder}/model.safetensors")
    found, still = (one_rank.run(step, draw_address(), folder, {"router_bias_rate": rate})[0] for rate in (RATE, 0.0))
    assert all(torch.equal(found["gradients"][name], still["gradients"][name]) for name in found["gradients"])
    assert torch.equal(read_biases(still["weights"]), read_biases(before))
    loads = torch.tensor(found["loads"], dtype=torch.float)
    moved = read_biases(found["weights"]) - read_biases(before)
    assert torch.allclose(moved, RATE * (loads.mean(dim=1, keepdim=True) - loads).sign(), atol=1e-7)
    assert moved.abs().max() > 0
    broken = one_rank.run(step, draw_address(), folder, {"router_bias_rate": RATE}, float("nan"))[0]
    assert torch.equal(read_biases(broken["weights"]), read_biases(before)), "a step that is not taken moves none"


@pytest.mark.parametrize("size", in_runs(large=["DP2-EP2", "CP2"], product=["TP2-EP2", "PP2", "TP2-ETP2"]))
def test_biases_move_alike_over_ranks(one_rank, pool_of, make_hf_model, size):
    folder, settings = make_hf_model("glm4_moe", False), {"router_bias_rate": RATE}
    (alone,) = one_rank.run(step, draw_address(), folder, settings)
    ranks = pool_of(size).run(step, draw_address(), folder, settings | parse_size(size))
    (weights,) = (rank["weights"] for rank in ranks if rank["weights"])
    assert len(ranks) == count_ranks(size)
    assert torch.equal(read_biases(weights), read_biases(alone["weights"]))


def export_rounded(rank: int, world: int, address: str, folder: str, target: str) -> dict:
    engine = build_engine(rank, world, address, folder, {"dtype": "bfloat16"})
    save_hf_folder(engine.export_weights(), engine.model, target, 10**9)
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def test_biases_are_in_fp32_in_an_engine_of_bfloat16(one_rank, make_hf_model, tmp_path):
    folder, target = make_hf_model("glm4_moe", False), tmp_path / "saved"
    (exported,) = one_rank.run(export_rounded, draw_address(), folder, str(target))
    biases, before = read_biases(exported), read_biases(load_file(f"{folder}/model.safetensors"))
    assert torch.equal(biases, before) and not torch.equal(before, before.bfloat16().float())
    assert {t.dtype for name, t in exported.items() if not name.endswith("correction_bias")} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen2", {"freeze": ("router",)}, "freeze names 'router', and the model has no experts; leave it out"),
        (
            "qwen3_moe",
            {"router_bias_rate": 0.1},
            "router_bias_rate=0.1 moves biases of experts, and the model has none",
        ),
        ("glm4_moe", {"router_bias_rate": 0.1, "freeze": ("router",)}, "moves biases, and freeze=.* keeps them; leave"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(make_hf_model, family, settings, message):
    """A model beside the actor may have no routers, and is given the actor's settings."""
    model, config = ModelSpec.from_folder(make_hf_model(family, False)), MegatronConfig(**settings)
    config.check_model(model)
    with pytest.raises(ValueError, match=message):
        config.check_spread(model)
    with pytest.raises(ValueError, match="freeze of all parts leaves nothing to learn"):
        MegatronConfig(freeze=("language",)).check_model(model)
