"""What the engine does with a step that it must not take."""

import math

import pytest
import torch
from engines_cases import build_engine, make_batch, plan, weighted_loss
from ranks import free_address


def poisoned_step(rank: int, world: int, address: str, folder: str, settings: dict) -> dict:
    """A good step, one whose gradient is infinite on one data-parallel rank alone, and a good one again."""
    engine = build_engine(rank, world, address, folder, settings | {"lr": 1e-3})
    batch = make_batch()
    _, shard = plan(engine, batch)

    def poison(outputs, micro):
        loss, metrics = weighted_loss(outputs, micro)
        return loss * (float("inf") if engine.dp_rank == 0 else 1.0), metrics

    def weights() -> dict:
        return {name: tensor.clone() for name, tensor in engine.export_weights()}

    steps = []
    for loss in (weighted_loss, poison, weighted_loss):
        result = engine.train_step(shard, loss, float(batch.mask.sum()))
        steps.append((result.grad_norm, result.lr, weights()))
    return {"steps": steps}


@pytest.mark.parametrize("settings", [{}, {"tp": 2}, {"pp": 2, "micro_batch_tokens": 16}], ids=["DP2", "TP2", "PP2"])
def test_a_gradient_that_is_not_finite_is_not_taken_by_any_rank(two_ranks, make_hf_model, settings):
    ranks = two_ranks.run(poisoned_step, free_address(), make_hf_model("qwen2", False), settings)
    for rank in ranks:
        (norm, _, after), (bad, _, same), (again, _, moved) = rank["steps"]
        assert norm > 0 and math.isnan(bad) and again > 0
        assert all(torch.equal(same[name], after[name]) for name in after)
        assert all(torch.isfinite(tensor).all() for tensor in moved.values())
        assert not after or any(not torch.equal(moved[name], after[name]) for name in after)
    assert any(rank["steps"][0][2] for rank in ranks)
