"""What the engine does with a step that it must not take."""

import math

import pytest
import torch
from support.models import VOCAB
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from engines.config import OptimizerConfig
from rlworker.checks.reference.huggingface import probe_loss
from rlworker.checks.tiny.models import make_tiny_text


def poisoned_step(rank: int, world: int, address: str, folder: str, settings: dict) -> dict:
    """A good step, one whose gradient is infinite on one data-parallel rank alone, and a good one again."""
    engine = build_engine(rank, world, address, folder, settings | {"optimizer": OptimizerConfig(lr=1e-3)})
    batch = make_batch()
    _, shard = plan(engine, batch)

    def poison(outputs, micro):
        loss, metrics = probe_loss(outputs, micro)
        return loss * (float("inf") if engine.dp_rank == 0 else 1.0), metrics

    def weights() -> dict:
        return {name: tensor.clone() for name, tensor in engine.export_weights()}

    steps = []
    for loss in (probe_loss, poison, probe_loss):
        result = engine.train_step(shard, loss, float(batch.mask.sum()))
        steps.append((result.grad_norm, result.lr, weights()))
    return {"steps": steps}


OTHER = OptimizerConfig(
    lr=4e-3, lr_scheduler="linear", lr_decay_steps=4, weight_decay=0.5, adam_beta1=0.5, adam_eps=1.0
)
"""Settings of an optimizer that a run goes on with."""


def resumed_step(rank: int, world: int, address: str, folder: str, out: str) -> tuple:
    """Weights after two steps, and after one step, a checkpoint, another engine and one more; and the rate and the
    parameter groups of a step that goes on with other settings."""
    settings = {"pp": 2, "optimizer": OptimizerConfig(lr=1e-3)}
    engine, batch = build_engine(rank, world, address, folder, settings), make_batch()
    _, shard = plan(engine, batch)
    engine.train_step(shard, probe_loss, float(batch.mask.sum()))
    engine.save(out)
    again = build_engine(rank, world, address, folder, settings)
    again.load(out)
    for each in (engine, again):
        each.train_step(shard, probe_loss, float(batch.mask.sum()))
    weights = [{name: tensor.clone() for name, tensor in each.export_weights()} for each in (engine, again)]
    other = build_engine(rank, world, address, folder, settings | {"optimizer": OTHER})
    other.load(out)
    result = other.train_step(shard, probe_loss, float(batch.mask.sum()))
    return weights, result.lr, [{**group, "params": None} for group in other.optimizer.param_groups]


def test_moments_behind_a_padded_bucket_are_resumed(two_ranks, tmp_path):
    """The tied embedding has a bucket of its own, after one that ends between two multiples of 128."""
    folder = make_tiny_text(tmp_path / "model", "qwen2", VOCAB, num_hidden_layers=2, num_key_value_heads=1)
    (tmp_path / "out").mkdir()
    for weights, lr, groups in two_ranks.run(resumed_step, draw_address(), folder, str(tmp_path / "out")):
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
        assert lr == pytest.approx(3e-3), "the second of four steps that decay"
        assert {(group["betas"], group["eps"]) for group in groups} == {((0.5, 0.999), 1.0)}
        assert {group["weight_decay"] for group in groups} == {0.5, 0.0}


@pytest.mark.parametrize("settings", [{}, {"tp": 2}, {"pp": 2, "micro_batch_tokens": 16}], ids=["DP2", "TP2", "PP2"])
def test_a_gradient_that_is_not_finite_is_not_taken_by_any_rank(two_ranks, make_hf_model, settings):
    ranks = two_ranks.run(poisoned_step, draw_address(), make_hf_model("qwen2", False), settings)
    for rank in ranks:
        (norm, _, after), (bad, _, same), (again, _, moved) = rank["steps"]
        assert norm > 0 and math.isnan(bad) and again > 0
        assert all(torch.equal(same[name], after[name]) for name in after)
        assert all(torch.isfinite(tensor).all() for tensor in moved.values())
        assert not after or any(not torch.equal(moved[name], after[name]) for name in after)
    assert any(rank["steps"][0][2] for rank in ranks)
