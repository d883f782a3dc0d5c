"""What a step is given to learn from, with scripted engines: which groups, and from which random numbers."""

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from support.rollout_workers import make_completions

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from recipes.common.addition import make_tokenizer
from rlworker.config.run import RunConfig
from rlworker.config.sections import AlgorithmConfig
from rlworker.data.rows import Row
from rlworker.errors import RunError
from rlworker.tracking.log import StepClock

ROWS = [Row(str(i), (i + 4,), "", {}) for i in range(12)]


class Rollouts:
    def generate(self, rows, sampling):
        return make_completions(*[([20, 2], [-1.0, -1.0], 0)] * (sampling.count * len(rows)))


class Rewards:
    """Prompts of an even number are answered right once, of an odd one never."""

    def score(self, texts, rows):
        from rlworker.rewards.pool import Scores

        firsts = [i == 0 or row is not rows[i - 1] for i, row in enumerate(rows)]
        return Scores([float(first and int(row.prompt) % 2 == 0) for first, row in zip(firsts, rows)], {}, [])


def sampler(rows, further, prompts=4):
    from rlworker.rollouts.sampler import Sampler

    algorithm = AlgorithmConfig(dynamic_sampling=further)
    rollout = VllmConfig(max_new_tokens=4, max_model_len=16)
    config = RunConfig(algorithm=algorithm, prompts_per_step=prompts, samples_per_prompt=3)
    config = replace(config, rollout=rollout, data=replace(config.data, max_prompt_tokens=8))
    phase = lambda *_: nullcontext()  # noqa: E731
    return Sampler(config, make_tokenizer(), (2,), rows, Rollouts(), Rewards(), phase, print)


@pytest.mark.parametrize(
    ("rows", "further", "kept", "drawn", "alike"),
    [
        (ROWS[:4], 0, 4, 4, 2),  # without dynamic sampling every group stays
        (ROWS[:4], 1, 4, 8, 4),  # two of four teach something, in each of two rollouts
        (ROWS[::2], 3, 4, 4, 0),  # all do
        (ROWS[1::2], 2, 0, 12, 12),  # none does
    ],
)
def test_groups_without_a_difference_are_dropped_and_others_drawn(rows, further, kept, drawn, alike):
    groups, metrics = sampler(rows, further).sample(StepClock(), 0)
    assert (len(groups), metrics["groups"], metrics["zero_variance_groups"]) == (kept, drawn, alike)
    assert metrics["samples"] == 3 * drawn
    assert not further or not any(group.has_zero_variance for group in groups)


class Ahead:
    """A stream that notes which draws were begun before each was waited for."""

    def __init__(self, version: int = 0):
        self.version, self.begun, self.seen, self.forgotten = version, [], [], []

    def begin(self, rows, sampling, goes_first=False):
        self.begun.append(sampling.stream)
        return rows, sampling

    def wait(self, draw):
        from rlworker.rollouts.scoring import score_completions

        self.seen.append(list(self.begun))
        completions = make_completions(*[([20, 2], [-1.0, -1.0], self.version)] * (draw[1].count * len(draw[0])))
        return score_completions(make_tokenizer(), Rewards(), draw[0], completions)

    def forget(self, seeds):
        self.forgotten.append(seeds)


def make_ahead(staleness: int, further: int = 0, rows=ROWS):
    drawn = sampler(rows, further)
    drawn.stream = Ahead()
    drawn.config = replace(drawn.config, rollout=replace(drawn.config.rollout, staleness=staleness))
    return drawn


def test_as_many_rollouts_are_open_as_tokens_may_be_stale_and_in_their_order():
    """The trainer lets them begin after each update, and none past the last step; each is the synchronous run's."""
    drawn, steps, taken = make_ahead(2), 5, []
    for step in range(steps):
        first = drawn.rollouts_done
        groups, _ = drawn.sample(StepClock(), step)
        drawn.stream.version = step + 1
        taken.append(([group.row.prompt for group in groups], drawn.list_row_numbers(first)))
        drawn.run_ahead(steps - step - 1)
    open_draws = [len(begun) - number for number, begun in enumerate(drawn.stream.seen)]
    assert open_draws == [1, 3, 3, 2, 1], "one at first, then 1 + 2, and at the end what is left"
    assert drawn.stream.begun == [(0, number, 0) for number in range(steps)]
    in_turns = sampler(ROWS, 0)
    for prompts, numbers in taken:
        first = in_turns.rollouts_done
        assert [group.row.prompt for group in in_turns.sample(StepClock(), 0)[0]] == prompts
        assert in_turns.list_row_numbers(first) == numbers == [int(prompt) for prompt in prompts]


def test_further_rollouts_of_dynamic_sampling_are_the_next_of_those_that_were_begun():
    drawn = make_ahead(1, further=1, rows=ROWS[:4])
    drawn.sample(StepClock(), 0)
    assert drawn.rollouts_done == 2 and drawn.stream.begun == [(0, 0, 0), (0, 1, 0)]
    drawn.run_ahead(9)
    assert drawn.stream.begun[2:] == [(0, 2, 0), (0, 3, 0)]
    drawn.sample(StepClock(), 0)
    assert drawn.rollouts_done == 4 and len(drawn.stream.begun) == 4


def test_a_sample_that_is_too_old_or_too_new_ends_the_run():
    for version, ok in ((2, False), (3, True), (4, True), (5, False)):
        drawn = make_ahead(1)
        drawn.stream.version = version
        if ok:
            drawn.sample(StepClock(), 4)
        else:
            with pytest.raises(RunError, match=rf"samples of weights \[{version}\], expected version 3 to 4"):
                drawn.sample(StepClock(), 4)


def test_a_run_that_goes_back_draws_again_what_was_being_sampled():
    drawn = make_ahead(2)
    drawn.sample(StepClock(), 0)
    drawn.run_ahead(9)
    drawn.go_on(0, 3.0, 0)
    assert drawn.stream.forgotten == [(0, 0, 2)]
    drawn.sample(StepClock(), 0)
    assert drawn.stream.begun == [(0, n, 0) for n in (0, 1, 2, 3, 0)] and drawn.completion_tokens != 3.0


def test_a_run_that_goes_on_with_another_batch_takes_the_rows_that_come_next():
    """Half an epoch in rollouts of three, then as much in rollouts of two: every row once, and a new order after."""
    first, second = sampler(ROWS, 0, prompts=3), sampler(ROWS, 0, prompts=2)
    for _ in range(2):
        first.sample(StepClock(), 0)
    second.go_on(first.rollouts_done, first.completion_tokens, first.prompts_done)
    for _ in range(3):
        second.sample(StepClock(), 0)
    taken = [*first.list_row_numbers(0), *second.list_row_numbers(2)]
    assert sorted(taken) == list(range(12)) and second.prompts_done == 12


def test_every_use_of_every_rollout_on_every_engine_has_numbers_of_its_own():
    """Also across seeds: sums of these once met each other."""
    names = itertools.product((0, 1, 2**32 - 1), range(60), range(2), range(9))
    seeds = {Sampling(1, 1.0, 4, name, ()).seed for name in names}
    assert len(seeds) == 3 * 60 * 2 * 9 and all(0 <= seed < 2**64 for seed in seeds)


def test_the_expected_length_follows_the_completions_and_is_asked_of_every_engine():
    drawn = sampler(ROWS[:4], 1)
    assert drawn.make_sampling(3).expected_tokens == 4.0, "the most there can be, before any was seen"
    drawn.sample(StepClock(), 0)
    assert drawn.make_sampling(3).expected_tokens == pytest.approx(2 + 2 * 0.8**2), "two rollouts of two tokens each"


def test_the_likeliest_tokens_are_asked_for_where_they_are_learned_from():
    from rlworker.rollouts.sampler import CANARY

    drawn = sampler(ROWS[:4], 1)
    assert drawn.make_sampling(3).top_logprobs == 0
    algorithm = replace(drawn.config.algorithm, score_centering=8)
    drawn.config = replace(drawn.config, algorithm=algorithm)
    assert drawn.make_sampling(3).top_logprobs == 8 and drawn.make_sampling(1, CANARY).top_logprobs == 0


def test_a_checkpoint_holds_what_decides_how_prompts_are_dealt():
    """A checkpoint is JSON, and a number comes back from it to the last bit."""
    from rlworker.trainers.rl import Trainer
    from rlworker.trainers.shared_devices import SharedDevices

    def trainer_of(drawn):
        trainer = Trainer.__new__(Trainer)
        trainer.sampler, trainer.version, trainer.empty_steps, trainer.critic = drawn, 3, 0, None
        trainer.actor = trainer.rollouts = SimpleNamespace(name="actor", call=lambda *_: None)
        trainer.devices = SharedDevices()
        trainer.sync_weights = trainer.check_canary = lambda: None
        return trainer

    drawn, resumed = sampler(ROWS[:4], 1), sampler(ROWS[:4], 1)
    drawn.sample(StepClock(), 0)
    state = json.loads(json.dumps(trainer_of(drawn).get_state()))
    trainer_of(resumed).restore(state | {"step": 1, "folder": ""})
    assert resumed.make_sampling(3) == drawn.make_sampling(3)


def play_sampler(play, further: int):
    """Make a sampler of plays, with scripted engines and the plays in this process."""
    from support.episodes.stages import LocalPool, make_codec, make_sample

    from engines.batch.samples import Completions
    from rlworker.rollouts.plays import Player

    class Engines:
        streams, temperatures = [], []

        def sample(self, requests, stream):
            self.streams.append(stream)
            self.temperatures.append({request.temperature for request in requests})
            return Completions.join([make_sample(str(place % 3)) for place, _ in enumerate(requests)])

    engines = Engines()
    drawn = sampler(ROWS, further)
    drawn.rollouts = engines
    drawn.scorer = Player(make_codec(), LocalPool(play), engines, default=-1.0)
    return drawn, engines


async def play_even(model, row):
    """Prompts of an even number are answered right in one of three, of an odd one never; 7 fails."""
    from rlworker.episodes import Episode

    episode = Episode(row)
    sample = await model.sample(episode)
    episode.observe("0")
    await model.sample(episode)
    if row.prompt == "7":
        raise KeyError("seven")
    episode.reward(float(int(row.prompt) % 2 == 0 and "0" in sample.text))
    return episode


def test_groups_of_episodes_are_drawn_and_dropped_as_groups_of_completions():
    drawn, engines = play_sampler(play_even, further=2)
    groups, metrics = drawn.sample(StepClock(), 0)
    assert len(groups) == 4 and not any(group.has_zero_variance for group in groups)
    assert metrics["turns"] == 2 and metrics["observed_tokens"] == 1 and metrics["samples"] == 3 * metrics["groups"]
    assert metrics["completion_tokens"] == 6, "of an episode: two samples of three tokens"
    assert drawn.completion_tokens < 4, "of a sample, by which the next are dealt out"
    assert len(set(engines.streams)) == len(engines.streams) == 2 * drawn.rollouts_done, "one for each round"
    scores = drawn.score_greedy(ROWS[6:8])
    assert engines.temperatures[-1] == {0.0} and scores.values == [1.0, -1.0] and scores.failures == {"raised": 1}
    assert scores.count_failures("heldout") == {"heldout_failures": 1, "heldout_raised": 1}
    sample = drawn.pick(groups)[0]
    assert [turn["by"] for turn in sample["turns"]] == ["prompt", "model", "environment", "model"]
    assert sample["outcome"] == "ok" and sample["turns"][3]["reward"] == sample["reward"]


@pytest.mark.parametrize("further", [0, 1])
def test_a_reward_that_fails_for_every_text_of_a_step_ends_the_run(further):
    """Whatever the kinds of failures, and of all rollouts of the step; one text that is scored lets it go on."""
    from rlworker.rewards.pool import RewardFailure, Scores

    class FailingRewards:
        def __init__(self, scored: int):
            self.scored, self.calls = scored, 0

        def score(self, texts, rows):
            self.calls += 1
            ours = self.scored if self.calls == 1 else 0
            failures = {"raised": len(texts) - ours - 1, "timeout": 1}
            first = RewardFailure("raised", rows[0].prompt, texts[0], "KeyError: 'level', at reward.py:3")
            return Scores([1.0] * ours + [0.0] * (len(texts) - ours), failures, [first])

    drawn = sampler(ROWS[:4], further)
    drawn.scorer = FailingRewards(scored=0)
    count = 12 * (1 + further)
    with pytest.raises(RunError) as error:
        drawn.sample(StepClock(), 0)
    said = f"reward: {count} of {count} rewards failed: {count - 1 - further} raised, {1 + further} timeout; raised on "
    assert str(error.value).startswith(said) and "KeyError: 'level', at reward.py:3. " in str(error.value)
    assert "rewards.log has what it printed" in str(error.value) and "--reward.time-limit-s" in str(error.value)
    assert drawn.rollouts_done == 0, "a run that goes on is asked the same once more"
    drawn.scorer = FailingRewards(scored=1)
    assert drawn.sample(StepClock(), 0)[1]["reward_failures"] == count - 1


def test_plays_that_all_fail_end_the_run_unless_the_model_led_them_there():
    from rlworker.episodes import Episode

    async def go_on(model, row):
        episode = Episode(row)
        while True:
            await model.sample(episode)

    with pytest.raises(RunError, match=r"play: 12 of 12 episodes failed: 12 raised; .*KeyError: .*episodes\.log has"):
        play_sampler(play_badly, further=0)[0].sample(StepClock(), 0)
    groups, metrics = play_sampler(go_on, further=0)[0].sample(StepClock(), 0)
    assert len(groups) == 4 and metrics["episode_limit"] == metrics["episode_failures"] == 12


async def play_badly(model, row):
    raise KeyError(row.prompt)


async def play_nothing(model, row):
    from rlworker.episodes import Episode

    return Episode(row)


def test_a_step_in_which_every_play_fails_before_it_samples_is_empty():
    """Without dynamic sampling, which would drop groups of equal rewards. Beside one that samples, others count."""
    from rlworker.trainers.rl import MAX_EMPTY_STEPS, Trainer

    async def play_one(model, row):
        return await (play_even if row.prompt == "2" else play_badly)(model, row)

    groups, metrics = play_sampler(play_one, further=0)[0].sample(StepClock(), 0)
    assert len(groups) == 4 and metrics["episode_failures"] == 9
    trainer, recorded = Trainer.__new__(Trainer), []
    trainer.log = SimpleNamespace(prompts=lambda *line: recorded.append(line))
    trainer.sampler, trainer.version, trainer.empty_steps = play_sampler(play_nothing, further=0)[0], 0, 0
    for trainer.steps_done in range(MAX_EMPTY_STEPS - 1):
        metrics, samples = trainer.step()
        assert metrics["empty_steps"] == trainer.steps_done == trainer.empty_steps and samples == []
        assert metrics["episode_unsampled"] == 12 and metrics["reward"] == metrics["completion_tokens"] == 0
    with pytest.raises(RunError, match=r"step 10: in 10 steps .*different rewards \(their mean is 0\) and a sample"):
        trainer.step()
    assert [(step, first, len(rows)) for step, first, rows in recorded] == [(n + 1, n, 4) for n in range(10)]


def test_a_play_that_cannot_be_sent_is_refused_and_told_from_a_reward():
    import threading

    from rlworker.episodes.model import is_play
    from rlworker.rewards.pool import pickle_reward

    lock = threading.Lock()

    async def guarded(model, row):
        with lock:
            return None

    assert is_play(guarded) and is_play(partial(guarded, None)) and not is_play(lambda text, row: 0.0)
    with pytest.raises(ValueError, match=r"play: .*guarded' cannot be sent to another process .*'_thread.lock'"):
        pickle_reward(guarded, "play")
