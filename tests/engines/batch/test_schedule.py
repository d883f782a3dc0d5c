"""Who computes what: balance, budgets and counts of micro-batches, and the way back to the batch's order."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from engines.batch.balance import balance_costs, estimate_costs
from engines.batch.batch import TrainBatch
from engines.batch.schedule import plan_schedule
from engines.batch.shard import TokenOutputs
from engines.config import MegatronConfig
from hardware.attention.rules import compute_slot_unit

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any)


def test_the_dearest_goes_to_whoever_has_least():
    """By hand: 9 | 7 | 5, then 5 to the 5 (10), 4 to the 7 (11), 1 to the 9 (10)."""
    assert balance_costs(np.array([4, 9, 5, 1, 7, 5]), 3).tolist() == [1, 0, 2, 0, 1, 2]
    assert balance_costs(np.array([9, 1, 1, 1]), 2).tolist() == [0, 1, 1, 0], "two each, though the first has enough"
    assert balance_costs(np.array([9, 1, 1, 1]), 2, equal_counts=False).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_log_normal_lengths_balance_over_a_thousand_replicas(sigma):
    lengths = np.random.default_rng(0).lognormal(np.log(512), sigma, 102_400).clip(1, 32_768).astype(np.int64)
    costs = estimate_costs(lengths, hidden=4096)
    owner = balance_costs(costs, 1024)
    loads = np.bincount(owner, weights=costs)
    assert (np.bincount(owner) == 100).all() and loads.max() <= 1.01 * loads.mean()


def test_cost_counts_the_work_of_a_layer():
    """Against multiplications counted one by one: 12 hidden^2 weights a token, two products with each token seen."""
    hidden = 64
    counted = [sum(12 * hidden**2 + 2 * hidden * seen for seen in range(1, n + 1)) / hidden for n in (100, 1000)]
    ours = estimate_costs(np.array([100, 1000]), hidden)
    assert ours[1] / ours[0] == pytest.approx(counted[1] / counted[0], rel=0.01)


def held_rows(replica) -> list:
    return [rows for rows in replica if len(rows)]


def test_sequences_that_share_their_images_stay_together():
    """24 prompts of eight samples over two replicas: each in one micro-batch. One that is large is not, nor are few."""
    prompts = np.repeat(np.arange(24), 8)
    lengths = np.random.default_rng(0).integers(5, 20, 192)
    config = MegatronConfig(ranks=2, micro_batch_tokens=320)

    def micro_batches(count: int = 192) -> list:
        schedule = plan_schedule(lengths[:count], config, 64, 2, together=prompts[:count])
        loads = [estimate_costs(lengths[np.concatenate(rows)], 64).sum() for rows in schedule.rows]
        assert max(loads) <= 1.1 * min(loads)
        parts = [rows for replica in schedule.rows for rows in held_rows(replica)]
        assert sorted(np.concatenate(parts)) == list(range(count)) and all(lengths[p].sum() <= 320 for p in parts)
        return parts

    assert all(sum(prompt in prompts[rows] for rows in micro_batches()) == 1 for prompt in range(24))
    assert all(sum(prompt in prompts[rows] for rows in micro_batches(24)) == 2 for prompt in range(3)), (
        "of both replicas"
    )
    lengths[:8] = 60
    assert sum(0 in prompts[rows] for rows in micro_batches()) > 1


@pytest.mark.parametrize(
    ("small", "rest", "settings", "parts"),
    [
        ([2] * 5, [75, 75], {"pp": 2}, 1),  # 10 of 160 slots: an eighth of what each of two stages has to do
        ([3, 2, 2, 2, 2], [75, 74], {"pp": 2}, 2),
        ([4] * 5, [70, 70], {}, 1),  # 20 of 160: an eighth of the whole
        ([5, 4, 4, 4, 4], [70, 69], {}, 2),
        ([4] * 5, [70, 70], {"most": 6}, 1),
        ([4] * 6, [100, 100], {"most": 6, "budget": 112}, 2),  # as many as a kernel takes leave no room for another
        ([4] * 6, [90, 90], {"budget": 102}, 1),  # nearly all sequences, and few slots: a pack of their own
    ],
)
def test_a_prompt_stays_together_up_to_an_eighth_of_a_stages_work(small, rest, settings, parts):
    """By hand, in packs that are full without it: one that is taken apart balances them."""
    settings = {"pp": 1, "budget": 110, "most": None} | settings
    config = MegatronConfig(ranks=settings["pp"], pp=settings["pp"], micro_batch_tokens=settings["budget"])
    prompts = [0] * len(small) + list(range(1, 1 + len(rest)))
    schedule = plan_schedule(small + rest, config, 64, 1, settings["most"], prompts)
    held = [[row for row in rows.tolist() if row < len(small)] for rows in schedule.rows[0]]
    assert len([rows for rows in held if rows]) == parts


@settings(max_examples=200, deadline=None)
@given(
    together=st.lists(st.integers(0, 6), min_size=40, max_size=40) | st.none(),
    lengths=LENGTHS,
    replicas=st.integers(1, 5),
    layout=st.sampled_from(["thd", "bshd"]),
    budget=st.integers(1, 200),
    sizes=st.sampled_from([{}, {"tp": 2}, {"cp": 2}, {"pp": 3}, {"tp": 2, "cp": 2}]),
    more=st.sampled_from([{}, {"pad_to_multiple_of": 4}, {"slots": 64}, {"slots": 128, "pad_to_multiple_of": 8}]),
    each=st.sampled_from([None, None, 2, 5]),
)
def test_every_token_is_computed_once_within_the_budget(together, lengths, replicas, layout, budget, sizes, more, each):
    ranks = int(np.prod(list(sizes.values()) or [1])) * replicas
    config = MegatronConfig(ranks=ranks, layout=layout, micro_batch_tokens=budget, **sizes, **more)
    schedule = plan_schedule(lengths, config, 64, replicas, each, together and together[: len(lengths)])
    held = [row for replica in schedule.rows for rows in replica for row in rows.tolist()]
    assert sorted(held) == np.flatnonzero(lengths).tolist()
    assert len({len(replica) for replica in schedule.rows}) == 1, "equal numbers of micro-batches"
    counts = [sum(map(len, replica)) for replica in schedule.rows]
    loads = [sum(lengths[row] for rows in replica for row in rows) for replica in schedule.rows]
    assert max(counts) - min(counts) <= 1 or (together and max(loads) <= 1.25 * sum(loads) / replicas + max(lengths))
    assert len(schedule.rows[0]) >= min(config.pp, max(counts))
    unit = compute_slot_unit(config.tp, config.cp, config.pad_to_multiple_of)
    slots = [-(-length // unit) * unit for length in lengths]
    most = min(budget, config.slots or budget) if layout == "thd" else budget

    def takes(rows) -> int:
        held = [slots[row] for row in rows]
        return sum(held) if layout == "thd" else len(held) * (config.slots or max(held))

    for rows in (rows for replica in schedule.rows for rows in replica if len(rows) > 1):
        assert takes(rows) <= most
        assert layout == "bshd" or each is None or len(rows) + bool(config.slots) <= each
    count = len(schedule.rows[0])
    if layout == "thd" and count > config.pp and 2 * max(slots) <= most and each is None and not together:
        # One fewer would have overflowed on some replica, whose others were then more than half full.
        assert any((count - 1) * most < 2 * sum(map(takes, replica)) for replica in map(held_rows, schedule.rows))


def test_micro_batches_are_as_few_as_the_budget_allows_by_hand():
    """Of 16 slots each. One replica: 8 + 8, 8 + 8. Two, by cost: 12 and 4 apiece, and the one of 20 goes alone."""

    def parts(lengths, **settings):
        config = MegatronConfig(micro_batch_tokens=16, **settings)
        return [
            [sorted(lengths[row] for row in rows) for rows in replica]
            for replica in plan_schedule(lengths, config, 64, config.dp).rows
        ]

    assert parts([8, 8, 8, 8]) == [[[8, 8], [8, 8]]]
    assert parts([12, 12, 4, 4], ranks=2) == [[[4, 12]], [[4, 12]]]
    assert sorted(map(len, parts([20, 3, 3, 3])[0])) == [1, 3]
    loads = [sum(map(sum, replica)) for replica in parts([1000, 600, 600, 3, 2, 1], ranks=2)]
    assert loads == [1003, 1203], "attention makes 1000 tokens dearer than twice 600, so those take the 3"
    assert parts([5, 5, 5], tp=2, ranks=2) == [[[5, 5], [5]]], "six slots each"
    assert parts([3, 3, 3, 3], pad_to_multiple_of=4) == [[[3, 3, 3, 3]]], "four slots each"
    assert parts([8, 7, 2, 2, 2], layout="bshd") == [[[7, 8], [2, 2, 2]]], "rows of like lengths"
    assert parts([4, 4, 4, 4], pp=2, ranks=2) == [[[4, 4], [4, 4]]], "one for each stage"
    schedule = plan_schedule([1] * 10, MegatronConfig(micro_batch_tokens=16), 64, 1, max_sequences=4)
    assert sorted(map(len, schedule.rows[0])) == [3, 3, 4], "of four sequences at most"
    assert len(parts([4, 4, 4, 4], slots=8)[0]) == 2


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, replicas=st.integers(1, 5))
def test_shards_carry_their_columns_and_outputs_come_back_in_order(lengths, replicas):
    batch = TrainBatch.from_ids([list(range(5, 6 + n)) for n in lengths], [1] * len(lengths))
    top_ids = torch.arange(2 * batch.num_tokens).view(-1, 2)
    batch = replace(batch, advantages=torch.arange(float(batch.num_tokens)), rollout_top_ids=top_ids)
    config = MegatronConfig(ranks=replicas, micro_batch_tokens=32)
    schedule = plan_schedule(batch.lengths, config, 64, replicas)
    outputs = []
    for shard in schedule.shards(batch):
        micro_batches = shard.micro_batches()
        assert all(micro.num_tokens for micro in micro_batches)
        real = micro_batches[: len(shard.counts)]
        tokens = torch.cat([micro.advantages for micro in real]) if real else torch.empty(0)
        top = torch.cat([micro.rollout_top_ids for micro in real]) if real else top_ids[:0]
        outputs.append(TokenOutputs(tokens, -tokens, top))
    found = schedule.restore(outputs)
    assert torch.equal(found.logprobs, batch.advantages) and torch.equal(found.entropy, -batch.advantages)
    assert torch.equal(found.top_logprobs, top_ids)
    assert schedule.restore([replace(part, top_logprobs=None) for part in outputs]).top_logprobs is None


def test_one_token_over_four_replicas_is_computed_by_one_and_repeated_by_the_others():
    batch = TrainBatch.from_ids([[1], [2, 3], [4]], [1, 1, 1])
    shards = plan_schedule(batch.lengths, MegatronConfig(ranks=4), 64, 4).shards(batch)
    assert sorted(len(shard.counts) for shard in shards) == [0, 0, 0, 1]
    assert [len(shard.micro_batches()) for shard in shards] == [1] * 4
    assert sum(shard.num_tokens for shard in shards) == 1 and [shard.replica for shard in shards] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="none of its 2 sequences has a token"):
        plan_schedule((0, 0), MegatronConfig(), 64, 1)


def few_sequences(rank, world, address, folder):
    """Gradient norm and metrics of one sequence over the replicas, by a loss that heeds no mask, and what is said of
    shards of different plans and of another replica's."""
    engine = build_engine(rank, world, address, folder, {})
    batch = make_batch()
    one = batch.select(3, 4)
    _, shard = plan(engine, one)
    result = engine.train_step(shard, unmasked_loss, float(one.mask.sum()))
    said = []
    schedule, _ = plan(engine, batch)
    for wrong in (plan(engine, batch.select(0, 4 + rank))[1], schedule.shards(batch)[0]):
        try:
            engine.forward(wrong)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return result.grad_norm, result.metrics, said


def unmasked_loss(outputs, batch):
    loss = -outputs.logprobs.sum()
    return loss, {"loss": loss.detach(), "tokens": torch.tensor(batch.num_tokens)}


def test_a_replica_without_a_sequence_adds_nothing_and_other_plans_are_refused(one_rank, two_ranks, make_hf_model):
    folder = make_hf_model("qwen2", False)
    ((norm, metrics, _),) = one_rank.run(few_sequences, draw_address(), folder)
    ranks = two_ranks.run(few_sequences, draw_address(), folder)
    for got, _, said in ranks:
        assert got == pytest.approx(norm, rel=1e-5)
        assert all("ranks [1] were given another plan of this batch than rank 0" in text for text in said)
    for name in ("loss", "tokens"):
        assert sum(found[name] for _, found, _ in ranks) == pytest.approx(metrics[name], rel=1e-5)
