"""Advantages of episodes of several sequences and turns, against loops over every token and numbers worked by hand."""

import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch

from engines.batch.batch import TrainBatch
from rlworker.algorithms import advantages
from rlworker.algorithms.advantages import (
    add_overlong_penalty,
    gae,
    limit_episodes,
    returns_to_go,
    turn_grpo,
    whiten,
)
from rlworker.algorithms.losses import constant_length, sequence_mean
from rlworker.algorithms.objective import penalize_reward
from rlworker.config.algorithm import Algorithm

EPISODES = [[6, 130, 9], [20], [0, 15], [5, 5], [1, 0], [40], [7, 3, 12], [0]]
"""Targets of each sequence of each episode."""
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]
SILENT = (1, 6)
"""Sequences of which nothing was sampled: one between two others of its episode, and one before its last."""


def make_batch() -> TrainBatch:
    """Episodes of several sequences and turns, with rewards of every kind, also where nothing counts."""
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(length for episode in EPISODES for length in episode)
    counts = torch.tensor([len(episode) for episode in EPISODES])
    total = sum(lengths)
    columns = {name: torch.zeros(total, dtype=torch.long) for name in ("inputs", "positions", "targets")}
    mask = torch.rand(total, generator=generator) < 0.6
    turn, start = torch.full((total,), -1, dtype=torch.int32), 0
    for number, length in enumerate(lengths):
        if number in SILENT:
            mask[start : start + length] = False
        start += length
    episode = torch.arange(len(EPISODES)).repeat_interleave(counts)
    of_token = episode.repeat_interleave(torch.tensor(lengths))
    for number in range(len(EPISODES)):
        places = (mask & (of_token == number)).nonzero()[:, 0]
        turn[places] = (torch.arange(len(places)) // 4).clamp(max=4).int()
    given = torch.rand(total, generator=generator) < 0.2
    floats = {name: torch.randn(total, generator=generator) for name in ("values", "penalties", "turn_rewards")}
    floats["turn_rewards"] *= given
    rewards = torch.randn(len(lengths), generator=generator)
    group = torch.tensor(GROUPS).repeat_interleave(counts)
    greedy = torch.tensor([0.5, -1.0, 2.0])[group]
    columns |= floats | dict(mask=mask, turn=turn, rewards=rewards, group=group, greedy_rewards=greedy)
    return TrainBatch(lengths, episode=episode * 3 + 1, **columns)  # numbers need not begin at 0


def list_tokens(batch: TrainBatch) -> list[list[tuple[int, float]]]:
    found, start, sequence = [], 0, 0
    for episode in EPISODES:
        tokens = []
        for length in episode:
            places = [n for n in range(start, start + length) if batch.mask[n]]
            for n in places:
                reward = float(batch.penalties[n]) + float(batch.turn_rewards[n])
                tokens.append((n, reward + (float(batch.rewards[sequence]) if n == places[-1] else 0.0)))
            start, sequence = start + length, sequence + 1
        found.append(tokens)
    return found


def sum_whole(batch: TrainBatch) -> list[float]:
    """Each episode's whole reward, tokens that do not count included."""
    sums, start, sequence = [], 0, 0
    for episode in EPISODES:
        end = start + sum(episode)
        given = batch.penalties[start:end].double().sum() + batch.turn_rewards[start:end].double().sum()
        sums.append(float(given + batch.rewards[sequence : sequence + len(episode)].double().sum()))
        start, sequence = end, sequence + len(episode)
    return sums


def per_token(per_episode: list[float]) -> torch.Tensor:
    return torch.tensor([value for value, episode in zip(per_episode, EPISODES) for _ in range(sum(episode))])


def close(got: torch.Tensor, want: torch.Tensor, most: float = 1e-4) -> bool:
    return float((got - want).abs().max()) <= most


def test_groups_compare_whole_episodes():
    batch = make_batch()
    whole = sum_whole(batch)
    groups = [[reward for reward, group in zip(whole, GROUPS) if group == number] for number in GROUPS]
    means = [statistics.mean(rewards) for rewards in groups]
    centred = [reward - mean for reward, mean in zip(whole, means)]
    assert close(advantages.dr_grpo(batch), per_token(centred))
    by_deviation = [c / (statistics.stdev(rewards) + 1e-4) for c, rewards in zip(centred, groups)]
    assert close(advantages.grpo(batch), per_token(by_deviation))
    others = [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward, rewards in zip(whole, groups)]
    assert close(advantages.rloo(batch), per_token(others))
    greedy = [reward - [0.5, -1.0, 2.0][group] for reward, group in zip(whole, GROUPS)]
    assert close(advantages.remax(batch), per_token(greedy))
    assert close(advantages.reinforce_plus_plus_baseline(batch), whiten(per_token(centred), batch.mask))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_sums_over_time_run_through_an_episode(gamma, lam):
    batch = make_batch()
    want, want_returns, want_sums = (torch.zeros(batch.num_tokens) for _ in range(3))
    for tokens in list_tokens(batch):
        following = running = to_go = 0.0
        for n, reward in reversed(tokens):
            running = reward + gamma * following - float(batch.values[n]) + gamma * lam * running
            following = float(batch.values[n])
            to_go = reward + gamma * to_go
            want[n], want_returns[n], want_sums[n] = running, running + following, to_go
    advantage, returns = gae(batch, gamma, lam)
    assert close(returns, want_returns) and close(advantage, whiten(want, batch.mask))
    assert close(returns_to_go(batch, gamma), want_sums)


def test_turns_are_compared_with_the_same_turn_of_others():
    batch = make_batch()
    tokens, whole = list_tokens(batch), sum_whole(batch)
    to_go: list[dict[int, float]] = []
    for number, episode in enumerate(tokens):
        turns = {int(batch.turn[n]) for n, _ in episode}
        to_go.append({t: sum(reward for n, reward in episode if batch.turn[n] >= t) for t in turns})
        to_go[-1][0] = whole[number]
    want = torch.zeros(batch.num_tokens)
    for number, episode in enumerate(tokens):
        for n, _ in episode:
            t = int(batch.turn[n])
            others = [given[t] for given, group in zip(to_go, GROUPS) if group == GROUPS[number] and t in given]
            deviation = statistics.stdev(others) if len(others) > 1 else 0.0
            want[n] = (to_go[number][t] - statistics.mean(others)) / (deviation + 1e-4)
    got = turn_grpo(batch)
    assert close(got, want) and len(set(got[batch.mask].tolist())) > 10


def test_turns_by_hand():
    """The episodes of the docstring: 1, 0 and 0, 4 in two turns; from the first on 1 and 4, from the second 0 and 4.

    Without a column of turns the n-th sequence of an episode is the n-th turn.
    """
    columns = {"rewards": torch.tensor([1.0, 0.0, 0.0, 4.0]), "group": torch.zeros(4, dtype=torch.long)}
    two = TrainBatch.from_ids([range(3)] * 4, [1] * 4, episode=torch.tensor([0, 0, 1, 1]), **columns)
    first, second = 1.5 / (4.5**0.5 + 1e-4), 2.0 / (8.0**0.5 + 1e-4)
    want = [-first, -first, -second, -second, first, first, second, second]
    assert turn_grpo(two).tolist() == pytest.approx(want)


def one_turn_batch() -> TrainBatch:
    batch = make_batch()
    return replace(batch, episode=None, turn=None, group=torch.arange(len(batch)) // 4)


ALL = [
    *(advantages.grpo, advantages.dr_grpo, advantages.rloo, advantages.remax, gae, returns_to_go),
    *(advantages.reinforce_plus_plus, advantages.reinforce_plus_plus_baseline, turn_grpo),
    lambda batch: add_overlong_penalty(batch, 30, 20).rewards,
    lambda batch: sequence_mean(batch)[0] / sequence_mean(batch)[1],
    lambda batch: torch.tensor(constant_length(batch, tokens=3)[1]),
]


@pytest.mark.parametrize("function", ALL)
def test_sequences_that_are_episodes_are_as_before_to_the_last_bit(function):
    plain = one_turn_batch()
    turn = torch.where(plain.mask, 0, -1).int()
    for batch in (replace(plain, episode=torch.arange(len(plain))), replace(plain, turn=turn)):
        pairs = zip(function(batch), function(plain)) if function is gae else [(function(batch), function(plain))]
        assert all(torch.equal(got, want) for got, want in pairs)


def test_one_turn_of_grpo_is_grpo():
    batch = one_turn_batch()
    assert torch.equal(turn_grpo(batch), advantages.grpo(batch) * batch.mask)


def test_an_episode_that_sampled_nothing_counts_in_its_group():
    """Rewards 3, 0, 0, of which the last was never sampled: the mean is 1 and not 1.5."""
    columns = {"rewards": torch.tensor([3.0, 0.0, 0.0]), "group": torch.zeros(3, dtype=torch.long)}
    batch = TrainBatch.from_ids([[1, 2], [1, 2], [1]], [1, 1, 1], **columns)
    assert advantages.dr_grpo(batch).tolist() == [2.0, -1.0]
    deviation = 3.0**0.5 + 1e-4
    assert turn_grpo(batch).tolist() == pytest.approx([2 / deviation, -1 / deviation])
    assert returns_to_go(batch).tolist() == [3.0, 0.0]
    silent = TrainBatch.from_ids([[1]], [1], rewards=torch.ones(1), group=torch.zeros(1, dtype=torch.long))
    assert len(turn_grpo(silent)) == len(advantages.grpo(silent)) == 0


def test_overlong_episodes_by_hand():
    """Episodes of 3 + 5 and 4 sampled tokens and a silent end: a limit of 10 with a buffer of 4 takes a half of 8."""
    batch = TrainBatch.from_ids(
        [range(4), range(6), range(1), range(5), range(4)],
        sampled=[[0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0], [0, 1, 1, 1, 1], [0, 0, 0, 0]],
        episode=torch.tensor([0, 0, 0, 1, 1]),
        rewards=torch.ones(5),
    )
    assert add_overlong_penalty(batch, max_tokens=10, buffer=4).rewards.tolist() == [1.0, 0.5, 1.0, 1.0, 1.0]
    # Of several completions an episode may have more tokens than the limit, and loses no more than 1.
    assert add_overlong_penalty(batch, max_tokens=6, buffer=4).rewards.tolist() == [1.0, 0.0, 1.0, 0.5, 1.0]
    one = TrainBatch.from_ids([[1, 2]], [1], rewards=torch.ones(1))
    assert add_overlong_penalty(one, max_tokens=1, buffer=1).rewards.tolist() == [0.0]


def test_the_limit_of_an_episode_is_that_of_its_turns_and_of_its_sequences():
    """A prompt of 4: one turn; four turns of 3 with 2 observed between; two turns in two sequences; none."""
    turns = [[-1] * 4 + [0] * 3, [-1] * 4 + [0] * 3 + [-1] * 2 + [1] * 3 + [-1] * 2 + [2] * 3 + [-1] * 2 + [3] * 3]
    turns += [[-1] * 4 + [0] * 3, [-1] * 6 + [1] * 2, [-1]]
    batch = TrainBatch.from_ids(
        [range(len(each)) for each in turns],
        sampled=[[turn >= 0 for turn in each] for each in turns],
        episode=torch.tensor([0, 1, 2, 2, 3]),
        turn=torch.tensor([turn for each in turns for turn in each[1:]], dtype=torch.int32),
        rewards=torch.ones(5),
    )
    assert limit_episodes(batch, sample_tokens=4, sequence_tokens=100).tolist() == [4, 16, 8, 1]
    # Context is 4, 10, and 4 + 6 tokens of two sequences.
    assert limit_episodes(batch, sample_tokens=8, sequence_tokens=12).tolist() == [8, 2, 14, 1]
    rewards = penalize_reward(batch, Algorithm(overlong_buffer=0.5), sample_tokens=4, sequence_tokens=100).rewards
    assert rewards.tolist() == [0.5, 0.5, 1.0, 0.75, 1.0], "3 of 4; 12 of 16; 5 of 8"


@pytest.mark.parametrize(("sampled", "reward"), [(8, 1.0), (9, 0.5), (10, 0.0)])
def test_one_turn_is_penalised_by_the_limit_of_a_sample(sampled, reward):
    batch = TrainBatch.from_ids([range(3 + sampled)], [3], rewards=torch.ones(1))
    got = penalize_reward(batch, Algorithm(overlong_buffer=0.2), sample_tokens=10, sequence_tokens=40)
    assert got.rewards.tolist() == [reward]


def test_aggregations_count_episodes():
    """Episodes of 1 + 3 and of 2 sampled tokens, and one of none."""
    batch = TrainBatch.from_ids(
        [range(2), range(5), range(3), range(1)],
        sampled=[[0, 1], [0, 1, 0, 1, 1], [0, 1, 1], [0]],
        episode=torch.tensor([4, 4, 7, 9]),
    )
    weights, denominator = sequence_mean(batch)
    assert weights.tolist() == [0.25, 0.25, 0, 0.25, 0.25, 0.5, 0.5] and denominator == 2
    assert partial(constant_length, tokens=10)(batch)[1] == 30.0
