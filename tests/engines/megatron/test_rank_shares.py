"""What a rank writes of a checkpoint: its own share, in a form that any other rank reads."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from engines.config import OptimizerConfig
from rlworker.checks.reference.huggingface import probe_loss

SETTINGS = {"optimizer": OptimizerConfig(lr=1e-3, adam_eps=1e-5)}


def test_boxes_are_the_elements_in_order():
    """Against numpy, which flattens the array: every place of each box, and no more boxes than the shape makes."""
    pytest.importorskip("megatron.core")
    from engines.megatron.checkpoint import cut_boxes

    assert list(cut_boxes((4, 10), 7, 25)) == [((0, 7), (1, 3)), ((1, 0), (1, 10)), ((2, 0), (1, 5))]
    draw = random.Random(0)
    for _ in range(300):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        start, end = sorted(draw.randint(0, array.size) for _ in range(2))
        boxes = list(cut_boxes(shape, start, end))
        parts = [array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in boxes]
        assert np.concatenate([np.empty(0, int), *map(np.ravel, parts)]).tolist() == list(range(start, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def take_step(engine, batch) -> None:
    engine.train_step(plan(engine, batch)[1], probe_loss, float(batch.mask.sum()))


def save_and_load(rank: int, world: int, address: str, folder: str, out: str, settings: dict) -> dict:
    """Save as Megatron does, gathered, and by shares; load each in the other way; the weights after one step more."""
    from megatron.core import dist_checkpointing

    from engines.megatron.checkpoint import LAYOUT, SaveInProcess

    def name_gathered(engine, is_loading: bool) -> dict:
        model = engine.module.module.sharded_state_dict(metadata=dict(LAYOUT))
        optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(LAYOUT))
        return {"model": model, "optimizer": optimizer, "schedule": engine.schedule.state_dict()}

    def load_gathered(engine) -> None:
        state = dist_checkpointing.load(name_gathered(engine, True), f"{out}/shares")
        engine.module.module.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.schedule.load_state_dict(state["schedule"])

    engines = [build_engine(rank, world, address, folder, settings) for _ in range(3)]
    take_step(engines[0], make_batch())
    names = engines[0].save(f"{out}/shares")
    state = name_gathered(engines[0], False)
    dist_checkpointing.save(state, f"{out}/gathered", SaveInProcess("torch_dist", 1), content_metadata=dict(LAYOUT))
    engines[1].load(f"{out}/gathered")
    load_gathered(engines[2])
    for engine in engines:
        take_step(engine, make_batch())
    weights = [{name: tensor.clone() for name, tensor in engine.export_weights()} for engine in engines]
    return {"names": names, "weights": weights}


@pytest.mark.parametrize("settings", [{}, pytest.param({"tp": 2}, marks=pytest.mark.large)], ids=["DP2", "TP2"])
def test_every_rank_writes_its_share_of_what_megatron_stores(two_ranks, make_hf_model, tmp_path, settings):
    """What is stored is Megatron's own layout, older checkpoints included; how it came there is not to be seen."""
    out = {way: tmp_path / way for way in ("shares", "gathered")}
    for folder in out.values():
        folder.mkdir()
    arguments = make_hf_model("qwen2", False), str(tmp_path), SETTINGS | settings
    ranks = two_ranks.run(save_and_load, draw_address(), *arguments)
    assert sorted(name for rank in ranks for name in rank["names"]) == sorted(p.name for p in out["shares"].iterdir())
    straight, from_gathered, from_shares = next(rank["weights"] for rank in ranks if rank["weights"][0])
    for other in (from_gathered, from_shares):
        assert all(torch.equal(tensor, other[name]) for name, tensor in straight.items())
    largest = {way: measure_largest(folder) for way, folder in out.items()}
    assert largest["shares"] <= 1.2
    if not settings:
        assert largest["gathered"] == 2, "rank 0 would write alone"


def measure_largest(folder: Path) -> float:
    sizes = [path.stat().st_size for path in folder.glob("__*")]
    return max(sizes) / (sum(sizes) / len(sizes))
