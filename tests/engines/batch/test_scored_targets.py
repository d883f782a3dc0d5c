"""Scores of counted targets alone against scores of all: the numbers that a loss or a metric reads are the same."""

from dataclasses import replace

import pytest
import torch
from support.ranks.engines_cases import LENGTHS, build_engine, compute_steps, make_batch, plan
from support.ranks.pool import draw_address
from support.rounding import check_distances, measure_rounding

from engines.batch.shard import Shard
from rlworker.checks.reference.huggingface import probe_loss


def weigh(batch):
    """Give some targets outside the mask a weight, and one sequence no counted target at all."""
    weights = batch.mask.float()
    weights[::5] = 0.5
    mask, last = batch.mask.clone(), batch.num_tokens - batch.lengths[-1]
    mask[last:], weights[last:] = False, 0.0
    return replace(batch, mask=mask, weights=weights)


def score_both_ways(rank: int, world: int, address: str, folder: str, settings: dict) -> dict | None:
    """Outputs of all targets and of the scored ones, and how many the head was given of each."""
    from engines.megatron import engine as engine_module

    engine = build_engine(rank, world, address, folder, settings)
    schedule, shard = plan(engine, weigh(make_batch()))
    score, given = engine_module.score_tokens, []

    def count(hidden, *args, **settings):
        given.append(len(hidden))
        return score(hidden, *args, **settings)

    engine_module.score_tokens = count
    try:
        outputs = [engine.forward(shard, every=every) for every in (True, False)]
    finally:
        engine_module.score_tokens = score
    engine.backward(shard, probe_loss, 10.0)  # through micro-batches without a scored target too
    return {"schedule": schedule, "outputs": outputs, "given": given} if engine.is_leader else None


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one"),
        pytest.param({"tp": 2}, id="TP2"),
        pytest.param({"cp": 2}, id="CP2", marks=pytest.mark.large),
        pytest.param({"pp": 2}, id="PP2", marks=pytest.mark.large),
    ],
)
def test_scores_of_targets_that_count(one_rank, two_ranks, make_hf_model, measured, settings):
    """Each sequence is a micro-batch of its own, so that the last has nothing to score. A product of a few rows is
    added up in another order than one of many."""
    ranks = two_ranks if settings else one_rank
    case, folder = settings | {"micro_batch_tokens": 1}, make_hf_model("qwen2", False)
    found = next(x for x in ranks.run(score_both_ways, draw_address(), folder, case) if x)
    every, scored = (found["schedule"].restore([outputs]) for outputs in found["outputs"])
    batch = weigh(make_batch())
    reads = batch.mask | (batch.weights != 0)
    want, distances = measure_rounding(compute_steps, folder), {}
    for kind, all_targets, few in (
        ("logprobs", every.logprobs, scored.logprobs),
        ("entropy", every.entropy, scored.entropy),
    ):
        distances[kind] = want.compare(kind, few, base=all_targets * reads)
        assert all_targets.all()
    check_distances(distances, measured, str(settings))
    if "cp" not in settings:  # where a rank has all tokens
        assert sum(found["given"]) == batch.num_tokens + int(reads.sum()) and 0 in found["given"]


def test_a_shard_finds_what_is_scored_of_each_micro_batch():
    batch = weigh(make_batch())
    shard = Shard(batch, (3, len(LENGTHS) - 4), 2, 0, 0)
    reads = batch.mask | (batch.weights != 0)
    parts = shard.find_scored()
    assert [len(part) for part in parts] == [micro.num_tokens for micro in shard.micro_batches()]
    want = [reads[: sum(batch.lengths[:3])], reads[sum(batch.lengths[:3]) : sum(batch.lengths[:-1])]]
    assert all((part == other.numpy()).all() for part, other in zip(parts, want))
    assert not parts[2].any() and not parts[3].any() and len(parts) == 4, "dummies are the last sequence"
    plain = Shard(replace(batch, weights=None), (len(LENGTHS),), 0, 0, 0).find_scored()
    assert len(plain) == 1 and torch.equal(torch.from_numpy(plain[0]), batch.mask)
