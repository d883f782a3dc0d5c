"""What a step is given to learn from, with scripted engines: which groups, and from which random numbers."""

import itertools
import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.environments.runners import Engines, LocalPool, encode, make_codec, make_loop, make_sample

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from rlworker.base.errors import RunError
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import CurriculumConfig
from rlworker.data.rows import Row
from rlworker.environments import Episode, batch_reward
from rlworker.environments.reward import make_environment
from rlworker.rollouts.curriculum import Curriculum
from rlworker.rollouts.trajectory import has_zero_variance
from rlworker.tracking.log import StepClock

ROWS = [Row(str(i), tuple(encode(str(i))), "", {}) for i in range(12)]


@batch_reward
def rate(texts, rows):
    """Prompts of an even number are answered right once, of an odd one never."""
    return [float(place == 0 and int(rows[0].prompt) % 2 == 0) for place in range(len(texts))]


class Scripted(Engines):
    """Engines that sample the numbers from 0 to 2 in turn, by weights of a version."""

    version = 0

    def sample(self, requests, stream):
        self.streams.append(stream)
        self.requests.append(list(requests))
        count = sum(request.sampling.count for request in requests)
        return [make_sample(str(place % 3), version=self.version) for place in range(count)]


def make_manager(rows, further, prompts=4, environment=rate, loop=None, **algorithm):
    from rlworker.algorithms.objective import make_objective
    from rlworker.rollouts.manager import RolloutManager

    algorithm = AlgorithmConfig(dynamic_sampling=further, **algorithm)
    rollout = VllmConfig(max_new_tokens=4, max_model_len=16)
    config = RunConfig(algorithm=algorithm, prompts_per_step=prompts, samples_per_prompt=3)
    config = replace(config, rollout=rollout, data=replace(config.data, max_prompt_tokens=8))
    engines = Scripted()
    loop = loop or make_loop(LocalPool(make_environment(environment)), engines, default=-1.0)
    phase = lambda *_: nullcontext()  # noqa: E731
    teaching = make_objective(config).find_teaching
    return RolloutManager(config, make_codec(), rows, engines, loop, phase, print, find_teaching=teaching)


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
    groups, metrics = make_manager(rows, further).sample(StepClock(), 0)
    assert (len(groups), metrics["groups"], metrics["zero_variance_groups"]) == (kept, drawn, alike)
    assert metrics["samples"] == 3 * drawn
    assert not further or not any(map(has_zero_variance, groups))


class Ahead:
    """A loop that runs ahead, and notes which batches were begun before each was waited for."""

    environment_seconds = 0.0

    def __init__(self):
        self.version, self.begun, self.seen, self.forgotten = 0, [], [], []

    def begin(self, rows, sampling, goes_first=False):
        self.begun.append(sampling.stream)
        return rows, sampling

    def wait(self, batch):
        self.seen.append(list(self.begun))
        engines = Scripted()
        engines.version = self.version
        loop = make_loop(LocalPool(make_environment(rate)), engines)
        return loop.wait(loop.begin(*batch))

    def forget(self, stream):
        self.forgotten.append(stream)


def make_ahead(staleness: int, further: int = 0, rows=ROWS):
    manager = make_manager(rows, further, loop=Ahead())
    manager.config = replace(manager.config, rollout=replace(manager.config.rollout, staleness=staleness))
    return manager


def test_as_many_rollouts_are_open_as_tokens_may_be_stale_and_in_their_order():
    """The trainer lets them begin after each update, and none past the last step; each is the synchronous run's."""
    drawn, steps, taken = make_ahead(2), 5, []
    for step in range(steps):
        first = drawn.rollouts_done
        groups, _ = drawn.sample(StepClock(), step)
        drawn.loop.version = step + 1
        taken.append(([group[0].row.prompt for group in groups], drawn.list_row_numbers(first)))
        drawn.run_ahead(steps - step - 1)
    open_draws = [len(begun) - number for number, begun in enumerate(drawn.loop.seen)]
    assert open_draws == [1, 3, 3, 2, 1], "one at first, then 1 + 2, and at the end what is left"
    assert drawn.loop.begun == [(0, number, 0) for number in range(steps)]
    in_turns = make_manager(ROWS, 0)
    for prompts, numbers in taken:
        first = in_turns.rollouts_done
        assert [group[0].row.prompt for group in in_turns.sample(StepClock(), 0)[0]] == prompts
        assert in_turns.list_row_numbers(first) == numbers == [int(prompt) for prompt in prompts]


def test_further_rollouts_of_dynamic_sampling_are_the_next_of_those_that_were_begun():
    drawn = make_ahead(1, further=1, rows=ROWS[:4])
    drawn.sample(StepClock(), 0)
    assert drawn.rollouts_done == 2 and drawn.loop.begun == [(0, 0, 0), (0, 1, 0)]
    drawn.run_ahead(9)
    assert drawn.loop.begun[2:] == [(0, 2, 0), (0, 3, 0)]
    drawn.sample(StepClock(), 0)
    assert drawn.rollouts_done == 4 and len(drawn.loop.begun) == 4


def test_a_sample_that_is_too_old_or_too_new_ends_the_run():
    for version, ok in ((2, False), (3, True), (4, True), (5, False)):
        drawn = make_ahead(1)
        drawn.loop.version = version
        if ok:
            drawn.sample(StepClock(), 4)
        else:
            with pytest.raises(RunError, match=rf"samples of weights \[{version}\], expected version 3 to 4"):
                drawn.sample(StepClock(), 4)


def test_a_run_that_goes_back_draws_again_what_was_being_sampled():
    drawn = make_ahead(2)
    drawn.sample(StepClock(), 0)
    drawn.run_ahead(9)
    drawn.go_on(0, 4.0, 0)
    assert drawn.loop.forgotten == [(0, 0, 2)]
    drawn.sample(StepClock(), 0)
    assert drawn.loop.begun == [(0, n, 0) for n in (0, 1, 2, 3, 0)] and drawn.completion_tokens != 4.0


def test_a_run_that_goes_on_with_another_batch_takes_the_rows_that_come_next():
    """Half an epoch in rollouts of three, then as much in rollouts of two: every row once, and a new order after."""
    first, second = make_manager(ROWS, 0, prompts=3), make_manager(ROWS, 0, prompts=2)
    for _ in range(2):
        first.sample(StepClock(), 0)
    second.go_on(first.rollouts_done, first.completion_tokens, first.prompts_done)
    for _ in range(3):
        second.sample(StepClock(), 0)
    taken = [*first.list_row_numbers(0), *second.list_row_numbers(2)]
    assert sorted(taken) == list(range(12)) and second.prompts_done == 12


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_curriculum_picks_what_is_drawn_and_goes_on_with_its_state(staleness):
    """Odd prompts are never right, and left out. A resumed run draws what the unbroken one does, ahead too."""

    def make():
        manager = make_ahead(staleness, further=1) if staleness else make_manager(ROWS, 1)
        manager.config = replace(manager.config, curriculum=CurriculumConfig(pass_rates=(0.1, 0.9)))
        manager.curriculum = Curriculum(manager.config, ROWS, [len(ROWS)])
        return manager

    def draw(manager, steps):
        taken = []
        for _ in range(steps):
            first = manager.rollouts_done
            groups, metrics = manager.sample(StepClock(), 0)
            manager.run_ahead(9)
            numbers = manager.list_row_numbers(first)
            assert {int(group[0].row.prompt) for group in groups} <= set(numbers)
            taken.append((numbers, [metrics[f"curriculum/{name}"] for name in ("seen", "too_hard", "too_easy")]))
        return taken

    whole, broken = make(), make()
    taken = draw(whole, 8)
    assert taken[-1][1] == [1.0, 0.5, 0.0]
    late = [number % 2 for numbers, _ in taken[4:] for number in numbers]
    assert 0 < sum(late) < len(late) / 3
    assert draw(broken, 3) == taken[:3]
    state = json.loads(json.dumps(broken.get_state()))
    resumed = make()
    draw(resumed, 2)  # a run that goes back within its program has been elsewhere
    resumed.go_on(state["rollouts"], state["completion_tokens"], state["prompts"], state["curriculum"])
    assert draw(resumed, 5) == taken[3:]


def test_every_use_of_every_rollout_on_every_engine_has_numbers_of_its_own():
    """Also across seeds: sums of these once met each other."""
    names = itertools.product((0, 1, 2**32 - 1), range(60), range(2), range(9))
    seeds = {Sampling(1, 1.0, 4, name, ()).seed for name in names}
    assert len(seeds) == 3 * 60 * 2 * 9 and all(0 <= seed < 2**64 for seed in seeds)


def test_the_expected_length_follows_the_completions_and_is_asked_of_every_engine():
    drawn = make_manager(ROWS[:4], 1)
    assert drawn.make_sampling(3).expected_tokens == 4.0, "the most there can be, before any was seen"
    drawn.sample(StepClock(), 0)
    assert drawn.make_sampling(3).expected_tokens == pytest.approx(3 + 1 * 0.8**2), "two rollouts of three tokens each"


def test_the_likeliest_tokens_are_asked_for_where_they_are_learned_from():
    from rlworker.rollouts.manager import CANARY

    drawn = make_manager(ROWS[:4], 1)
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
        trainer.manager, trainer.version, trainer.empty_steps, trainer.critic = drawn, 3, 0, None
        trainer.actor = trainer.rollouts = SimpleNamespace(name="actor", call=lambda *_: None)
        trainer.devices = SharedDevices()
        trainer.sync_weights = trainer.check_canary = lambda: None
        return trainer

    drawn, resumed = make_manager(ROWS[:4], 1), make_manager(ROWS[:4], 1)
    drawn.sample(StepClock(), 0)
    state = json.loads(json.dumps(trainer_of(drawn).get_state()))
    trainer_of(resumed).restore(state | {"step": 1, "folder": ""})
    assert resumed.make_sampling(3) == drawn.make_sampling(3)


async def answer_even(policy, row):
    """Prompts of an even number are answered right in one of three, of an odd one never; 7 fails."""
    episode = Episode(row)
    sample = await policy.sample(episode)
    episode.observe("0")
    await policy.sample(episode)
    if row.prompt == "7":
        raise KeyError("seven")
    episode.reward(float(int(row.prompt) % 2 == 0 and "0" in sample.text))
    return episode


def test_groups_of_several_turns_are_drawn_and_dropped_as_groups_of_one():
    drawn = make_manager(ROWS, 2, environment=answer_even)
    groups, metrics = drawn.sample(StepClock(), 0)
    assert len(groups) == 4 and not any(map(has_zero_variance, groups))
    assert metrics["turns"] == 2 and metrics["observed_tokens"] == 1 and metrics["samples"] == 3 * metrics["groups"]
    assert metrics["completion_tokens"] == 6, "of an episode: two samples of three tokens"
    assert drawn.completion_tokens < 4, "of a sample, by which the next are dealt out"
    streams = drawn.rollouts.streams
    assert len(set(streams)) == len(streams) == 2 * drawn.rollouts_done, "one for each turn"
    assert metrics["time_environment"] > 0
    scores = drawn.score_greedy(ROWS[6:8])
    assert {request.sampling.temperature for request in drawn.rollouts.requests[-1]} == {0.0}
    assert scores.values == [1.0, -1.0] and scores.failures == {"raised": 1}
    assert scores.count_failures("heldout") == {"heldout_failures": 1, "heldout_raised": 1}
    sample = drawn.pick(groups)[0]
    assert [turn["by"] for turn in sample["turns"]] == ["prompt", "model", "environment", "model"]
    assert sample["outcome"] == "ok" and sample["turns"][3]["reward"] == sample["reward"]


def test_what_episodes_note_is_told_once(capsys):
    async def note(policy, row):
        episode = Episode(row)
        await policy.sample(episode)
        episode.notes.append("environment: it has its own tools")
        return episode

    drawn = make_manager(ROWS[:4], 0, environment=note)
    for _ in range(2):
        drawn.sample(StepClock(), 0)
    assert capsys.readouterr().out.count("environment: it has its own tools") == 1


async def take_turns(policy, row):
    """Of a prompt of an even number one episode earns 1 in its first turn, all others in their second; of 1 and 3 all
    earn it in their second."""
    episode = Episode(row)
    first = await policy.sample(episode)
    episode.reward(float("0" in first.text and int(row.prompt) % 2 == 0))
    episode.observe("0")
    await policy.sample(episode)
    episode.reward(float(not episode.rewards[0][1]))
    return episode


@pytest.mark.parametrize(("advantage", "kept"), [("turn_grpo", {0, 2}), ("grpo", set())])
def test_dynamic_sampling_asks_the_advantages_which_groups_teach(advantage, kept):
    """All episodes have the reward 1. In which turn they earned it is what `turn_grpo` learns from."""
    groups, metrics = make_manager(ROWS[:4], 1, environment=take_turns, advantage=advantage).sample(StepClock(), 0)
    assert {int(group[0].row.prompt) for group in groups} == kept and len(groups) == (4 if kept else 0)
    assert metrics["zero_variance_groups"] == metrics["groups"] == 8


def test_dynamic_sampling_asks_no_advantage_that_reads_more_than_rewards():
    """That of a critic has no values yet: equal rewards decide."""
    groups, _ = make_manager(ROWS[:4], 1, advantage="remax").sample(StepClock(), 0)
    assert len(groups) == 4 and not any(map(has_zero_variance, groups))


@pytest.mark.parametrize(("buffer", "kept"), [(0.5, 4), (0.0, 0)])
def test_a_penalty_for_length_teaches_though_rewards_are_equal(buffer, kept):
    """Texts of 3 tokens, of which the limit is 4, and of 2: the third of each prompt ends early."""
    drawn = make_manager(ROWS[:4], 1, environment=lambda text, row: 0.0, overlong_buffer=buffer)
    sample = drawn.rollouts.sample
    drawn.rollouts.sample = lambda requests, stream: [
        replace(one, token_ids=one.token_ids[1:], logprobs=one.logprobs[1:], spans=((0, 2),)) if place % 3 == 2 else one
        for place, one in enumerate(sample(requests, stream))
    ]
    assert len(drawn.sample(StepClock(), 0)[0]) == kept


@pytest.mark.parametrize("further", [0, 1])
def test_an_environment_that_fails_for_every_episode_of_a_step_ends_the_run(further):
    """All rollouts of the step count; one episode that is scored lets it go on."""
    fine = []

    def fail(text, row):
        if row.prompt in fine:
            return 1.0
        raise KeyError("level")

    drawn = make_manager(ROWS[:4], further, environment=fail)
    with pytest.raises(RunError) as error:
        drawn.sample(StepClock(), 0)
    count = 12 * (1 + further)
    said = f"environment: {count} of {count} episodes failed: {count} raised; raised on prompt '"
    assert str(error.value).startswith(said) and "turn 1: KeyError: 'level', at " in str(error.value)
    assert "environment.log has what it printed" in str(error.value)
    assert "--environment.time-limit-s" in str(error.value)
    assert drawn.rollouts_done == 0, "a run that goes on is asked the same once more"
    fine.append(ROWS[0].prompt)
    assert drawn.sample(StepClock(), 0)[1]["episode_failures"] == count - 3 * (1 + further)


def test_environments_that_all_fail_do_not_end_the_run_where_the_model_led_them_there():
    async def go_on(policy, row):
        episode = Episode(row)
        while True:
            await policy.sample(episode)

    groups, metrics = make_manager(ROWS, 0, environment=go_on).sample(StepClock(), 0)
    assert len(groups) == 4 and metrics["episode_limit"] == metrics["episode_failures"] == 12


async def raise_at_once(policy, row):
    raise KeyError(row.prompt)


async def sample_nothing(policy, row):
    return Episode(row)


def test_a_step_in_which_every_environment_fails_before_it_samples_is_empty():
    """Without dynamic sampling, which would drop groups of equal rewards. Beside one that samples, others count."""
    from rlworker.trainers.rl import MAX_EMPTY_STEPS, Trainer

    async def answer_one(policy, row):
        return await (answer_even if row.prompt == "2" else raise_at_once)(policy, row)

    groups, metrics = make_manager(ROWS, 0, environment=answer_one).sample(StepClock(), 0)
    assert len(groups) == 4 and metrics["episode_failures"] == 9
    trainer, recorded = Trainer.__new__(Trainer), []
    trainer.log = SimpleNamespace(prompts=lambda *line: recorded.append(line))
    trainer.manager, trainer.version, trainer.empty_steps = make_manager(ROWS, 0, environment=sample_nothing), 0, 0
    for trainer.steps_done in range(MAX_EMPTY_STEPS - 1):
        metrics, samples = trainer.step()
        assert metrics["empty_steps"] == trainer.steps_done == trainer.empty_steps and samples == []
        assert metrics["episode_no_generation"] == 12 and metrics["reward"] == metrics["completion_tokens"] == 0
    with pytest.raises(RunError, match=r"step 10: in 10 steps .*different rewards \(their mean is 0\) and a sample"):
        trainer.step()
    assert [(step, first, len(rows)) for step, first, rows in recorded] == [(n + 1, n, 4) for n in range(10)]


def test_an_environment_that_cannot_be_sent_is_refused():

    from rlworker.environments.processes.pool import pickle_environment

    lock = threading.Lock()

    async def guarded(policy, row):
        with lock:
            return None

    def reward(text, row):
        with lock:
            return 1.0

    for function in (guarded, reward):
        said = rf"environment: .*{function.__name__}.* cannot be sent to another process .*'_thread.lock'"
        with pytest.raises(ValueError, match=said):
            pickle_environment(make_environment(function))
