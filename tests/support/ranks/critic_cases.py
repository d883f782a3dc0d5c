"""What the ranks of a critic run, and how far their values and gradients are from a reference."""

from collections.abc import Callable

import torch
from support.ranks.engines_cases import build_engine, plan

from engines.models.hf_folder import save_hf_folder
from engines.models.spec import ModelSpec

VALUES, GRADIENTS = 1e-5, 1e-6


def run_critic(
    rank: int, world: int, address: str, folder: str, settings: dict, make: Callable, loss: Callable, target: str = ""
) -> dict:
    """Compute values and gradients of the batch ``make(model)``; with ``target`` the critic is also saved there."""
    model = ModelSpec.from_folder(folder, head="value")
    engine = build_engine(rank, world, address, model, settings)
    from engines.probes.megatron import gather_gradients

    batch = make(model)
    schedule, shard = plan(engine, batch)
    values = engine.forward(shard)
    engine.backward(shard, loss, float(batch.mask.sum()))
    gradients = gather_gradients(engine)
    if target:
        save_hf_folder(engine.export_weights(), model, target, 10**9)
    return {
        "schedule": schedule,
        "dp_rank": engine.dp_rank,
        "values": values.values if engine.is_leader else None,
        "gradients": gradients if engine.is_leader else None,
    }


def check_critic(ranks: list[dict], want: tuple[torch.Tensor, dict], measured, of_the_largest: float = 0.0) -> None:
    """Compare with values ``[N]`` and gradients by their names. A gradient may differ by ``of_the_largest``, too."""
    want_values, want_gradients = want
    leaders = sorted((rank for rank in ranks if rank["values"] is not None), key=lambda rank: rank["dp_rank"])
    found = leaders[0]["schedule"].restore_order(torch.cat([rank["values"] for rank in leaders]))
    values, gradients = float((found - want_values).abs().max()), leaders[0]["gradients"]
    assert set(gradients) == set(want_gradients)
    worst, name = max((float((gradients[n] - x).abs().max()), n) for n, x in want_gradients.items())
    largest = max(float(gradient.abs().max()) for gradient in want_gradients.values())
    measured({"values": values, "gradients": worst})
    assert values <= VALUES and worst <= max(GRADIENTS, of_the_largest * largest), name
