"""What the planner says autograd keeps, against what it keeps: every tensor that an engine saves for its backward."""

from collections import Counter

import pytest
from support.factors import settings_of
from support.ranks.engines_cases import build_engine, plan
from support.ranks.pool import free_address

from engines.megatron.activations import MicroBatch, count_kept
from rlworker.checks.huggingface import probe_loss

WITHIN = 0.1
TOKENS, SEQUENCES = 64, 8
"""Inputs of each sequence, and sequences of the step."""


class Kept:
    """Bytes of the storages that autograd holds, by hooks on saved tensors."""

    def __init__(self, apart: set[int]):
        self.apart, self.holders, self.bytes, self.most = apart, Counter(), 0, 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.apart or not size:
            return tensor
        return Held(self, tensor, place, size)


class Held:
    """A saved tensor, for as long as the graph has it."""

    def __init__(self, kept: Kept, tensor, place: int, size: int):
        self.kept, self.tensor, self.place, self.size = kept, tensor, place, size
        kept.bytes += 0 if kept.holders[place] else size
        kept.most = max(kept.most, kept.bytes)
        kept.holders[place] += 1

    def __del__(self):
        self.kept.holders[self.place] -= 1
        self.kept.bytes -= 0 if self.kept.holders[self.place] else self.size


def measure_kept(rank: int, world: int, address: str, folder: str, settings: dict) -> tuple[int, float]:
    """The most bytes that a rank's autograd held in a step, and what was planned."""
    import torch
    from megatron.core import parallel_state as mpu

    from engines.batch.batch import TrainBatch

    engine = build_engine(rank, world, address, folder, settings)
    batch = TrainBatch.from_ids([[3] * (TOKENS + 1)] * SEQUENCES, [1] * SEQUENCES)
    batch = TrainBatch(lengths=batch.lengths, **batch.columns() | {"advantages": torch.ones(batch.num_tokens)})
    _, shard = plan(engine, batch)
    kept = Kept({parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: getattr(held, "tensor", held)):
        engine.backward(shard, probe_loss, 7.0)
    assert not kept.bytes, "everything is given back"
    sequences = shard.counts[0]
    assert set(shard.counts) == {sequences} and len(shard.counts) >= engine.config.pp
    micro, stage = MicroBatch(sequences * TOKENS, sequences), mpu.get_pipeline_model_parallel_rank()
    return kept.most, count_kept(engine.model, engine.config, stage, micro, engine.platform.kernel_memory).most


CASES = [
    ("qwen3", "one", {}),
    ("qwen3", "one", {"layout": "bshd", "dtype": "bfloat16"}),
    ("qwen2", "one", {"recompute": "core"}),
    ("qwen3", "one", {"recompute": "full"}),
    ("qwen3", "one", {"recompute": "core", "dtype": "bfloat16"}),
    ("llama", "one", {"recompute": "full", "dtype": "bfloat16"}),
    ("qwen2", "TP2", {}),
    ("qwen3", "TP2", {"recompute": "full", "layout": "bshd"}),
    ("qwen2", "CP2", {}),
    ("qwen3", "CP2", {"recompute": "core", "layout": "bshd"}),
    ("qwen3", "PP2", {}),
    ("llama", "PP2", {"recompute": "full"}),
]


@pytest.mark.parametrize(("family", "size", "settings"), CASES)
def test_what_autograd_keeps_is_planned(pool_of, make_hf_model, measured, family, size, settings):
    settings = settings_of(size) | {"micro_batch_tokens": 2 * TOKENS} | settings
    for found, planned in pool_of(size).run(measure_kept, free_address(), make_hf_model(family, False), settings):
        apart = planned / found - 1
        measured({"planned over kept - 1": abs(apart)})
        assert abs(apart) < WITHIN
