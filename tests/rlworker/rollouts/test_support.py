"""Support replay: logprobs and entropy over the ids that sampling kept, against the whole masked vocabulary."""

from dataclasses import replace

import pytest
import torch
from support.ranks.engines_cases import build_engine, gather_logits, plan
from support.ranks.pool import draw_address

from engines.batch.batch import TrainBatch
from rlworker.rollouts.trajectory import replay_support

VOCAB, KEPT = 99, 7


def draw_batch() -> TrainBatch:
    """Two prompts with four completions each, of which every place kept one to seven ids, the sampled one included."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(0, VOCAB, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(9), draw(5)]
    sequences = [prompts[i // 4] + draw(2 + 3 * (i % 4)) for i in range(8)]
    batch = TrainBatch.from_ids(sequences, [len(prompts[i // 4]) for i in range(8)])
    n = batch.num_tokens
    kept = torch.stack([torch.randperm(VOCAB, generator=generator)[:KEPT] for _ in range(n)]).int()
    kept = torch.where((kept == batch.targets[:, None]) & (torch.arange(KEPT) > 0), -1, kept)
    kept[:, 0] = batch.targets.int()
    kept[torch.arange(KEPT) >= torch.randint(1, KEPT + 1, (n, 1), generator=generator)] = -1
    kept[~batch.mask] = -1
    columns = {"rollout_top_ids": kept, "rollout_top_logprobs": torch.zeros(n, KEPT)}
    return replace(batch, advantages=torch.randn(n, generator=generator), **columns)


def score_kept(rank: int, world: int, address: str, folder: str, settings: dict) -> dict | None:
    engine = build_engine(rank, world, address, folder, settings)
    batch = replay_support(draw_batch())
    schedule, shard = plan(engine, batch)
    outputs, logits = engine.forward(shard), gather_logits(engine, shard)
    return {"schedule": schedule, "outputs": outputs, "logits": logits} if engine.is_leader else None


@pytest.mark.parametrize(
    "settings",
    [
        {"share": "prompts"},
        {"layout": "bshd", "pad_to_multiple_of": 8, "micro_batch_tokens": 64},
        {"tp": 2},
        {"cp": 2, "micro_batch_tokens": 32},
        {"pp": 2},
    ],
    ids=["shared prompts", "padded", "TP2", "CP2", "PP2"],
)
def test_kept_ids_through_the_engine(one_rank, two_ranks, make_hf_model, settings, measured):
    """The oracle: the same logits, without sharing, all others masked, in float64."""
    ranks = two_ranks if {"tp", "cp", "pp"} & settings.keys() else one_rank
    found = next(x for x in ranks.run(score_kept, draw_address(), make_hf_model("qwen2", False), settings) if x)
    outputs = found["schedule"].restore([found["outputs"]])
    logits = found["schedule"].restore_order(found["logits"]).double()
    batch = replay_support(draw_batch())
    masked = torch.full_like(logits, -torch.inf)
    for place in batch.mask.nonzero()[:, 0].tolist():
        ids = batch.support[place][batch.support[place] >= 0].long()
        masked[place, ids] = logits[place, ids]
    log_p = masked[batch.mask].log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e30)).sum(-1)
    logprobs = log_p.gather(-1, batch.targets[batch.mask][:, None])[:, 0]
    differences = {
        "logprobs": float((outputs.logprobs[batch.mask].double() - logprobs).abs().max()),
        "entropy": float((outputs.entropy[batch.mask].double() - entropy).abs().max()),
    }
    measured(differences)
    assert differences["logprobs"] <= 2e-6 and differences["entropy"] <= 1e-6, differences
    assert (outputs.logprobs[batch.mask] == 0).any(), "where one id was kept"


def test_the_column_is_cut_to_what_was_kept_and_a_sampled_id_outside_is_refused():
    batch = draw_batch()
    kept = batch.rollout_top_ids.clone()
    kept[:, 4:] = -1
    few = replay_support(replace(batch, rollout_top_ids=kept))
    assert few.support.shape == (batch.num_tokens, 4) and few.rollout_top_ids is None
    place = sum(batch.lengths[:5]) + batch.lengths[5] - 1  # the last target of the sixth sequence
    kept[place, 0] = (batch.targets[place] + 1) % VOCAB
    message = rf"rollout: sequence 5 of the batch has id {batch.targets[place]} at place {place}, which is none of the"
    with pytest.raises(RuntimeError, match=message):
        replay_support(replace(batch, rollout_top_ids=kept))
