"""Advantages against numbers worked by hand, and the blocked sums against a plain loop.

``test_episode_advantages.py`` has those that compare whole groups.
"""

import math
from functools import partial

import pytest
import torch
from support.rounding import Draw, check_distances, measure_rounding

from engines.batch.batch import TrainBatch
from rlworker.algorithms import advantages
from rlworker.algorithms.advantages import (
    Selection,
    add_kl_penalty,
    gae,
    returns_to_go,
    sum_discounted,
    whiten,
)
from rlworker.algorithms.losses import kl_k2
from rlworker.algorithms.objective import check_group_size, configure_advantage
from rlworker.base.errors import RunError
from rlworker.config.run import CriticConfig, RunConfig


def groups_of(*rewards, tokens=2) -> TrainBatch:
    flat = [reward for group in rewards for reward in group]
    group = [i for i, group in enumerate(rewards) for _ in group]
    ids = [[5] * (tokens + 1)] * len(flat)
    return TrainBatch.from_ids(ids, [1] * len(flat), rewards=torch.tensor(flat), group=torch.tensor(group))


def per_sequence(values, tokens=2) -> list[float]:
    return [value for value in values for _ in range(tokens)]


def test_reinforce_plus_plus_by_hand():
    """Rewards 1 and 0 at the last token, a penalty of -1 at the second sequence's first: returns 1, 1, -1, 0."""
    batch = groups_of([1.0, 0.0])
    penalties = torch.tensor([0.0, 0.0, -1.0, 0.0])
    batch = TrainBatch(lengths=batch.lengths, **batch.columns() | {"penalties": penalties})
    assert returns_to_go(batch).tolist() == [1.0, 1.0, -1.0, 0.0]
    mean, deviation = 0.25, math.sqrt((0.75**2 * 2 + 1.25**2 + 0.25**2) / 4)
    want = [(x - mean) / deviation for x in (1.0, 1.0, -1.0, 0.0)]
    assert advantages.reinforce_plus_plus(batch).tolist() == pytest.approx(want, rel=1e-5)
    # With the baseline the whole rewards are 1 and -1 about a mean of 0, whose deviation over the tokens is 1.
    assert advantages.reinforce_plus_plus_baseline(batch).tolist() == pytest.approx([1.0, 1.0, -1.0, -1.0])


def test_distillation_by_hand():
    batch = groups_of([0.0])
    columns = batch.columns() | {"ref_logprobs": torch.tensor([-1.0, -3.0])}
    columns |= {"rollout_logprobs": torch.tensor([-2.0, -0.5])}
    assert advantages.distill(TrainBatch(lengths=batch.lengths, **columns)).tolist() == [1.0, -2.5]
    old = {"old_logprobs": torch.tensor([-1.0, -1.0])}
    assert advantages.distill(TrainBatch(lengths=batch.lengths, **columns | old)).tolist() == [0.0, -2.0]


def test_a_run_with_a_critic_takes_gae_at_its_settings():
    batch = ragged_batch(turns=False)
    critic = CriticConfig(train=True, gamma=0.5, lam=0.9)
    found = configure_advantage(RunConfig(critic=critic))(batch)
    for got, wanted, swapped in zip(found, gae(batch, gamma=0.5, lam=0.9), gae(batch, gamma=0.9, lam=0.5)):
        assert torch.equal(got, wanted) and not torch.allclose(got, swapped)
    assert configure_advantage(RunConfig()) is advantages.grpo


def ragged_batch(turns: bool) -> TrainBatch:
    """Sequences with gaps in their masks, one without any counting token, one empty.

    Args:
        turns: the mask is of long stretches, as of prompts and several turns; else every token for itself.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 130, 0, 1, 64, 7, 300)
    n = sum(lengths)
    columns = {name: torch.zeros(n, dtype=torch.long) for name in ("inputs", "positions", "targets")}
    mask = torch.rand(n, generator=generator) < 0.7
    if turns:
        mask = (torch.arange(n) // 40) % 2 == 0
    mask[5 + 130 + 1 + 64 : 5 + 130 + 1 + 64 + 7] = False
    floats = {name: torch.randn(n, generator=generator) for name in ("values", "penalties")}
    rewards = torch.randn(len(lengths), generator=generator)
    return TrainBatch(lengths, mask=mask, rewards=rewards, **columns, **floats)


def loop_over_time(draw: Draw, gamma: float, lam: float, turns: bool) -> dict[str, torch.Tensor]:
    """Compute advantages and returns ``[N]`` one token after another, from a sequence's end to its beginning."""
    batch = ragged_batch(turns)
    drawn = {name: getattr(batch, name) for name in ("values", "penalties", "rewards")}
    with draw.computing(), torch.no_grad():
        numbers = draw.move(drawn)
        advantage, returns = torch.zeros(2, batch.num_tokens)
        start = 0
        for i, length in enumerate(batch.lengths):
            places = [n for n in range(start, start + length) if batch.mask[n]]
            following, running = torch.zeros(2)
            for k, n in reversed(list(enumerate(places))):
                reward = numbers["penalties"][n] + (numbers["rewards"][i] if k == len(places) - 1 else 0.0)
                running = reward + gamma * following - numbers["values"][n] + gamma * lam * running
                following = numbers["values"][n]
                advantage[n], returns[n] = running, running + following
            start += length
        return {"advantages": whiten(advantage, batch.mask), "returns": returns}


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_loop_over_time(measured, gamma, lam, turns):
    batch = ragged_batch(turns)
    assert (Selection.from_mask(batch.mask, batch.lengths).index is None) == turns
    advantage, returns = gae(batch, gamma, lam)
    want = measure_rounding(loop_over_time, gamma, lam, turns, folder=None)
    distances = {"advantages": want.compare("advantages", advantage), "returns": want.compare("returns", returns)}
    check_distances(distances, measured, f"{gamma} {lam} {turns}")


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_blocked_sums_are_the_loop(decay):
    """Lengths on, below and above a block, of one block of blocks and of more, and empty ones at either end."""
    lengths = [0, 1, 63, 64, 65, 128, 0, 64 * 64, 64 * 64 + 1, 9000, 3, 0]
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want, start = torch.zeros_like(x), 0
    for length in lengths:
        running = 0.0
        for n in reversed(range(start, start + length)):
            running = want[n] = float(x[n]) + decay * running
        start += length
    got = sum_discounted(x, torch.tensor(lengths), decay)
    assert float((got - want).abs().max()) <= 1e-9


def test_a_sequence_that_is_not_finite_stays_alone():
    lengths = torch.tensor([100, 100, 100])
    x = torch.ones(300)
    x[150] = float("nan")
    got = sum_discounted(x, lengths, 0.9)
    assert got[:100].isfinite().all() and got[200:].isfinite().all() and got[100].isnan()


def test_kl_in_the_reward_by_hand():
    batch = groups_of([1.0])
    logprobs = {"rollout_logprobs": torch.tensor([-1.0, -2.0]), "ref_logprobs": torch.tensor([-1.5, -1.0])}
    batch = TrainBatch(lengths=batch.lengths, **batch.columns() | logprobs)
    assert add_kl_penalty(batch, 0.1).penalties.tolist() == pytest.approx([-0.05, 0.1])
    assert add_kl_penalty(batch, 0.1, kl_k2).penalties.tolist() == pytest.approx([-0.0125, -0.05])
    # The whole reward of the sequence is 1 - 0.05 + 0.1.
    two = groups_of([1.0, 1.0])
    columns = two.columns() | {"penalties": torch.tensor([-0.05, 0.1, 0.0, 0.0])}
    got = advantages.dr_grpo(TrainBatch(lengths=two.lengths, **columns)).tolist()
    # What is left of rewards of about 1 is off by their last digit.
    assert got == pytest.approx(per_sequence([0.025, -0.025]), abs=2 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("function", "option"), [(advantages.remax, "greedy-baseline"), (advantages.distill, "reference"), (gae, "critic")]
)
def test_a_column_that_is_missing_is_named_with_its_option(function, option):
    with pytest.raises(RunError, match=f"set --.*{option}"):
        function(groups_of([1.0]))


def test_every_advantage_is_the_same_in_any_dtype_of_rewards():
    for function in (advantages.grpo, advantages.dr_grpo, advantages.rloo, partial(returns_to_go, gamma=0.9)):
        floats, ints = groups_of([1.0, 0.0, 2.0]), groups_of([1, 0, 2])
        assert torch.equal(function(floats), function(ints))


@pytest.mark.parametrize("size", [3, 6, 8, 16, 64])
@pytest.mark.parametrize(("one", "other"), [(0.1, 1.1), (0.9, 0.3), (-200.3, 123456.7), (1e6, -1e-3)])
def test_a_group_of_equal_rewards_teaches_nothing_whatever_they_are(size, one, other):
    """Sums of fp32 would leave a rest of rounding, as large as any advantage after the division by its deviation."""
    names = "grpo", "dr_grpo", "rloo", "turn_grpo", "reinforce_plus_plus_baseline"
    for function in (getattr(advantages, name) for name in names):
        assert not function(groups_of([one] * size, [other] * size)).any(), function.__name__


def test_advantages_of_a_group_refuse_a_group_of_one():
    for advantage in (advantages.grpo, advantages.dr_grpo, advantages.rloo, advantages.reinforce_plus_plus_baseline):
        assert not advantage(groups_of([0.3], [1.0])).any(), "which is why"
        for given in (advantage, partial(partial(advantage))):
            check_group_size(given, 2)
            with pytest.raises(ValueError, match=f"samples_per_prompt=1 leaves {advantage.__name__} nothing"):
                check_group_size(given, 1)
    for advantage in (gae, advantages.remax, advantages.reinforce_plus_plus, advantages.distill, lambda batch: None):
        check_group_size(advantage, 1)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20, 1e30])
def test_rewards_of_any_size_that_float32_holds_have_advantages(scale):
    """Those of 1 and 0, apart from the term that keeps a division from being one by zero."""
    batch = groups_of([1.0 * scale, 0.0, 0.0, 1.0 * scale])
    if scale >= 1:
        assert advantages.grpo(batch).tolist() == pytest.approx(per_sequence([0.866, -0.866, -0.866, 0.866]), rel=1e-3)
        assert advantages.reinforce_plus_plus(batch).tolist() == pytest.approx(per_sequence([1.0, -1.0, -1.0, 1.0]))
    for name in ("grpo", "turn_grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        found = getattr(advantages, name)(batch)
        assert found.isfinite().all() and found[0] > 0 > found[2], name
