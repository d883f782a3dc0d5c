"""What an episode holds, what its record says of it, and the batch that is made of that."""

import asyncio
import contextvars

import pytest
from support.environments.runners import (
    EOS,
    LIMITS,
    LocalPool,
    encode,
    make_codec,
    make_rows,
    make_sample,
    run_episodes,
    tell,
)

from rlworker.environments import Episode, EpisodeLimit, one_turn
from rlworker.environments.codec import using_codec
from rlworker.rollouts.metrics import score_groups, summarise_groups
from rlworker.rollouts.trajectory import batch_groups


@pytest.fixture(autouse=True)
def codec():
    codec = make_codec()
    with using_codec(codec):
        yield codec


@pytest.fixture
def row():
    return make_rows("1+1=")[0]


def test_what_is_observed_is_context_and_what_is_sampled_has_its_turn(row):
    episode = Episode(row)
    episode.reward(0.5)
    episode.add_sample(make_sample("2").token_ids)
    episode.observe("ok")
    episode.observe(encode("7"))
    episode.add_sample(make_sample("3").token_ids)
    episode.reward(1)
    (pieces,) = episode.sequences
    assert [piece.turn for piece in pieces] == [-1, 0, -1, -1, 1]
    assert episode.token_ids == [*encode("1+1=~2"), EOS, *encode("ok7~3"), EOS] and len(episode) == 13
    assert episode.rewards == [(-1, 0.5), (1, 1.0)] and episode.turns == 2


def test_a_fork_begins_another_sequence_of_the_same_turns(row):
    episode = Episode(row)
    episode.add_sample(make_sample("2").token_ids)
    episode.fork("so far: 2;")
    episode.add_sample(make_sample("3").token_ids)
    assert episode.forks == 1 and len(episode) == len("so far: 2;") + 3
    assert [[piece.turn for piece in pieces] for pieces in episode.sequences] == [[-1, 0], [-1, 1]]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda e: e.reward(float("nan")), "got reward nan, expected a number that keeps the sum .* at or below 1e.06"),
        (lambda e: e.reward(1e39), "got reward 1e.39, expected a number"),
        (lambda e: e.reward("1"), "got reward '1', expected a number"),
        (lambda e: e.reward(None), "got reward None, expected a number"),
        (lambda e: [e.reward(-1e6), e.reward(0), e.reward(1)], "got reward 1, expected a number that keeps the sum"),
        (lambda e: e.observe([1.5]), "expected text, ids, or messages"),
        (lambda e: e.observe([-1]), "expected text, ids, or messages"),
        (lambda e: e.observe([99]), "observe: got id 99, expected an id of the model, 0 to 98"),
        (lambda e: e.fork([]), "the prompt is empty, expected at least one token"),
        (lambda e: Episode(e.row, ""), "the prompt is empty, expected at least one token"),
        (lambda e: e.observe("look", ["a.png"]), "got images for a model without vision"),
        (lambda e: e.observe({"role": "user", "content": "1"}), "got chat messages after a prompt that is not a chat"),
        (lambda e: Episode(e.row, tools=[{}]), "a prompt that is not a chat, .*; give the prompt as chat messages"),
    ],
)
def test_what_cannot_be_written_is_refused(row, act, message):
    with pytest.raises(ValueError, match=message):
        act(Episode(row))


def test_there_is_no_text_without_a_tokenizer(row):
    with pytest.raises(RuntimeError, match="outside of an environment, where no tokenizer is set"):
        contextvars.Context().run(Episode(row).observe, "text")


def test_ids_that_the_tokenizer_does_not_know_are_left_out_of_the_text(codec):
    assert codec.decode([*encode("12"), 5000, *encode("3")]) == "123"


def test_stops_are_single_tokens(codec):
    assert codec.encode_stops([">", 7]) == (*encode(">"), 7)
    assert codec.encode_stops(">") == (*encode(">"),) and codec.encode_stops(7) == (7,), "one alone"
    for stop in (99, -1, 2.5, None):
        with pytest.raises(ValueError, match=r"sample: (got id 99, expected an id of the model|expected text, ids)"):
            codec.encode_stops([stop])
    with pytest.raises(ValueError, match="stop 'ab' is 2 tokens"):
        codec.encode_stops(["ab"])


def test_one_turn_is_the_environment_of_a_reward():
    environment = one_turn(lambda text, row: float(text == "~" + row.answer))
    right, wrong = run_episodes(LocalPool(environment), make_rows("4+1=", "5+1="))  # the sample is the prompt's length
    assert tell(right) == [[(-1, "4+1="), (0, "~4<eos>")]] and right.rewards == ((0, 1.0),)
    assert wrong.reward == 0.0 and wrong.failure is None and wrong.turns == 1


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda policy, episode: policy.sample(episode, max_tokens=2.5), "max_tokens=2.5, expected a whole number"),
        (
            lambda policy, episode: policy.sample(episode, max_tokens=0),
            "max_tokens=0, expected a whole number, 1 or more",
        ),
        (
            lambda policy, episode: policy.tool(print, limit_s=float("inf")),
            "limit_s=inf and memory_mb=1024, expected sec",
        ),
        (
            lambda policy, episode: policy.tool(print, limit_s=0),
            "limit_s=0 and memory_mb=1024, expected seconds above 0",
        ),
        (lambda policy, episode: policy.tool(print, memory_mb=0.5), "memory_mb=0.5, expected .* whole number of MB"),
    ],
)
def test_limits_that_are_none_are_refused_where_they_are_given(ask, message):
    async def environment(policy, row):
        episode = Episode(row)
        with pytest.raises(ValueError, match=message):
            await ask(policy, episode)
        await policy.sample(episode)
        return episode

    (record,) = run_episodes(LocalPool(environment), make_rows("1+1="))
    assert record.failure is None


async def write_twice(policy, row):
    """Two turns, a reward for each; the second in a new sequence, with a limit and a stop of its own."""
    episode = Episode(row)
    first = await policy.sample(episode)
    episode.observe(f"{first.finished};")
    episode.reward(1)
    await policy.sample(episode, max_tokens=3, stop=[">"])
    episode.fork([9, 9])
    await policy.sample(episode)
    episode.reward(2)
    episode.reward(3)
    episode.observe("nobody reads this")
    return episode


def test_a_trajectory_has_the_tokens_of_each_author():
    """By hand: the prompt's five ids, then two samples of three with five observed ids between; then a fork."""
    (record,) = run_episodes(LocalPool(write_twice), make_rows("12+1="))
    assert tell(record) == [
        [(-1, "12+1="), (0, "~5<eos>"), (-1, "True;"), (1, "~3<eos>")],
        [(-1, "%%"), (2, "~2<eos>")],
    ]
    assert (record.turns, record.forks, record.observed_tokens, record.reward) == (3, 1, 5, 6.0)


def test_trajectories_are_batched_with_their_rewards():

    async def skip(policy, row):
        episode = Episode(row)
        episode.reward(0.25)
        return episode

    records = [run_episodes(LocalPool(environment), make_rows("12+1="))[0] for environment in (write_twice, skip)]
    groups = [records]
    batch = batch_groups(groups)
    assert batch.lengths == (15, 4, 0) and batch.episode.tolist() == [0, 0, 1], "what was not sampled has no tokens"
    first = [*encode("12+1=~5"), EOS, *encode("True;~3"), EOS]
    assert (
        batch.targets.tolist()[:15] == first[1:] and batch.turn.tolist()[:15] == [-1] * 4 + [0] * 3 + [-1] * 5 + [1] * 3
    )
    assert batch.rollout_logprobs[batch.mask].tolist() == [-3, -2, -1] * 3
    assert batch.mask.sum() == 9 and batch.turn[batch.mask].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert batch.rewards.tolist() == [0.0, 5.0, 0.25] and batch.turn_rewards.nonzero().tolist() == [[6]]
    scores = score_groups(groups, make_codec())
    assert scores.values == [6.0, 0.25] and scores.failures == {"no_generation": 1}
    assert (
        "1 of 2 episodes failed: 1 no_generation; no_generation on prompt '12+1=': turn 0: returned before"
        in scores.summarise()
    )
    means = {"turns": 1.5, "forks": 0.5, "tool_calls": 0, "tool_failures": 0, "observed_tokens": 2.5}
    assert summarise_groups(groups).items() >= means.items()


def test_the_requests_of_an_episode_say_what_it_asked_for():
    pool, seen = LocalPool(write_twice), []

    def say(ids, number):
        seen.append(len(ids))
        return "5"

    run_episodes(pool, make_rows("12+1="), say=say)
    assert seen == [5, 13, 2]
    assert LIMITS.sample_tokens == 8


def test_an_environment_may_catch_its_limit():
    async def talk(policy, row):
        episode = Episode(row)
        try:
            while True:
                await policy.sample(episode)
        except EpisodeLimit as limit:
            episode.reward(float(f"{limit}".startswith("turn 5 of at most 4")))
        return episode

    (record,) = run_episodes(LocalPool(talk), make_rows("1="))
    assert record.failure is None and record.turns == 4 and record.reward == 1.0


def test_environments_may_run_tasks_of_their_own():
    async def gather(policy, row):
        episode = Episode(row)
        sample, number = await asyncio.gather(policy.sample(episode), asyncio.sleep(0.01, 3))
        episode.reward(number if sample.text == "~2" else 0)
        return episode

    (record,) = run_episodes(LocalPool(gather), make_rows("1="))
    assert record.failure is None and record.reward == 3.0
