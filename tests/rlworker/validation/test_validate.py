"""Validation over scripted engines: greedy answers and samples of several sets, their metrics and tables."""

import math
import operator
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce

import pytest
from support.environments.runners import Engines, LocalPool, encode, make_codec, make_loop, make_sample

from engines.config import VllmConfig
from rlworker.base.errors import RunError
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig
from rlworker.config.sft import SftConfig
from rlworker.config.validation import ValidationConfig
from rlworker.data.rows import Row
from rlworker.environments import Episode, one_turn
from rlworker.environments.parts import combine_parts
from rlworker.tracking.run_folder import Score

SAMPLES = ("5", "7", "7", "8")
"""What is sampled of every prompt; the greedy answer is 5."""


class Answers(Engines):
    """Engines that give the same answers to every prompt."""

    def sample(self, requests, stream):
        self.streams.append(stream)
        self.requests.append(list(requests))
        greedy = requests[0].sampling.temperature == 0
        count = sum(one.sampling.count for one in requests)
        return [make_sample(SAMPLES[0 if greedy else place % 4]) for place in range(count)]


def make_row(prompt: str, answer: str, source: str | None = None) -> Row:
    return Row(prompt, tuple(encode(prompt)), answer, {"data_source": source} if source else {})


SETS = {
    "": [make_row("1", "7", "easy"), make_row("2", "5", "hard"), make_row("3", "9", "hard")],
    "aime": [make_row("4", "5")],
}


def contains(text: str, row: Row) -> float:
    return float(row.answer in text)


def find_digit(text: str, row: Row) -> str:
    return text[-1]


def make_manager(environment, pass_reward=1.0, **validation):
    from rlworker.rollouts.manager import RolloutManager

    rollout = VllmConfig(max_new_tokens=4, max_model_len=16, temperature=0.9)
    data, validation = DataConfig(max_prompt_tokens=8), ValidationConfig(**validation)
    limits = EnvironmentConfig(pass_reward=pass_reward)
    config = RunConfig(rollout=rollout, data=data, validation=validation, environment=limits)
    engines = Answers()
    loop = make_loop(LocalPool(environment), engines)
    return RolloutManager(config, make_codec(), [], engines, loop, lambda *_: nullcontext(), print)


def validate(manager, sets=SETS):
    from rlworker.validation.validate import validate

    return validate(manager, sets)


def test_each_set_has_its_metrics_and_each_source_a_line():
    """Worked by hand. Of the first set the greedy 5 is right once in three. Of four samples 7 is right twice, 5 once,
    9 never: pass@2 is 1 - 1/6, 1 - 3/6 and 0. All four vote for 7, and two as one does."""
    manager = make_manager(one_turn(contains, find_digit), samples=4)
    metrics = validate(manager).metrics
    assert metrics.pop("heldout_failures") == metrics.pop("heldout/aime_failures") == 0
    whole = {"": 1 / 3, "_mean_at_4": 3 / 12, "_pass_at_1": 3 / 12, "_pass_at_2": (5 / 6 + 1 / 2) / 3}
    whole |= {"_pass_at_4": 2 / 3, "_maj_at_1": 3 / 12, "_maj_at_2": 3 / 12, "_maj_at_4": 1 / 3}
    aime = {"": 1.0, "_mean_at_4": 1 / 4, "_pass_at_1": 1 / 4, "_pass_at_2": 1 / 2, "_pass_at_4": 1.0}
    aime |= {"_maj_at_1": 1 / 4, "_maj_at_2": 1 / 4, "_maj_at_4": 0.0}
    expected = {f"heldout{name}": value for name, value in whole.items()}
    expected |= {f"heldout/aime{name}": value for name, value in aime.items()}
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert set(expected) == set(manager.config.validation.list_metrics(SETS)), "all that may be chosen by name"


def test_the_table_has_a_line_for_each_source_of_a_set_that_has_several():
    table = validate(make_manager(one_turn(contains), samples=4)).table
    lines = [(line["set"], line["source"], line["rows"], line["greedy"]) for line in table]
    assert lines == [("", "", 3, 1 / 3), ("", "easy", 1, 0.0), ("", "hard", 2, 0.5), ("aime", "", 1, 1.0)]
    assert [line["mean_at_4"] for line in table] == [0.25, 0.5, 0.125, 0.25]
    assert all("maj_at_4" not in line for line in table), "nothing finds answers"


def test_samples_are_drawn_at_their_temperature_from_numbers_of_each_set():
    manager = make_manager(one_turn(contains), samples=4, temperature=0.7)
    validate(manager)
    asked = [(requests[0].sampling.count, requests[0].sampling.temperature) for requests in manager.rollouts.requests]
    assert asked == [(1, 0.0), (4, 0.7)] * 2
    assert manager.rollouts.streams[1] != manager.rollouts.streams[3], "else two sets would have equal noise"
    again = make_manager(one_turn(contains), samples=4, temperature=0.7)
    validate(again)
    assert again.rollouts.streams == manager.rollouts.streams, "a resumed run draws the same"
    again.rollouts_done += 1
    validate(again)
    assert again.rollouts.streams[5] != again.rollouts.streams[1]


def test_without_a_temperature_it_is_the_rollouts_and_without_samples_there_are_none():
    manager = make_manager(one_turn(contains), samples=2)
    validate(manager)
    assert manager.rollouts.requests[1][0].sampling.temperature == 0.9
    plain = make_manager(one_turn(contains))
    assert set(validate(plain).metrics) == {"heldout", "heldout_failures", "heldout/aime", "heldout/aime_failures"}
    assert len(plain.rollouts.requests) == 2


def test_a_reward_below_the_threshold_is_a_wrong_answer():
    half = one_turn(lambda text, row: 0.5 * (row.answer in text))
    sets = {"": SETS[""][:1]}
    found = [validate(make_manager(half, samples=4, **more), sets).metrics for more in ({}, {"pass_reward": 0.5})]
    assert [one["heldout_mean_at_4"] for one in found] == [0.25, 0.25]
    assert [one["heldout_pass_at_4"] for one in found] == [0.0, 1.0]


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.1,) * 10, (1 / 49,) * 49])
def test_parts_of_a_reward_that_sum_to_one_pass(weights):
    """Added one after another they make 0.9999999999999999, as 0.7 + 0.2 + 0.1 does; ``sum`` is exact from 3.12 on."""
    added = reduce(operator.add, weights)
    assert added == pytest.approx(1.0, abs=1e-15) and (added < 1.0 or added > 1.0)
    parts = {f"part_{number}": lambda text, row: 1.0 for number in range(len(weights))}
    environment = combine_parts(parts, {}, dict(zip(parts, weights, strict=True)))
    metrics = validate(make_manager(environment, samples=2), {"": SETS[""][:1]}).metrics
    assert metrics["heldout_pass_at_1"] == 1.0


def test_an_environment_of_its_own_gives_answers_to_vote_on_and_failures_are_counted():
    async def env(policy, row):
        episode = Episode(row)
        sample = await policy.sample(episode)
        episode.answer = sample.text[-1]
        if episode.answer == "8":
            raise KeyError("eight")
        episode.reward(float(sample.text[-1] == row.answer))
        return episode

    metrics = validate(make_manager(env, samples=4), {"": SETS[""][:1]}).metrics
    assert metrics["heldout_maj_at_4"] == 1.0 and metrics["heldout_mean_at_4"] == 0.5
    assert metrics["heldout_failures"] == metrics["heldout_raised"] == 1


def test_a_metric_that_needs_answers_is_refused_where_nothing_finds_them():
    with pytest.raises(RunError, match=r"no metric 'heldout_maj_at_4', since the environment finds no answers"):
        validate(make_manager(one_turn(contains), samples=4, metric="heldout_maj_at_4"))


@pytest.mark.parametrize(
    ("settings", "sets", "every", "said"),
    [
        (dict(metric="heldout_pass_at_4"), {"": "a"}, 1, r"must be one of heldout; did you mean 'heldout'\?"),
        (dict(metric="heldout/aim", samples=2), {"aime": "a"}, 1, r"did you mean 'heldout/aime'\?"),
        (dict(metric="heldout"), {}, 1, r"must be none, since there are no held-out rows; set --data\.heldout"),
        (dict(patience=2), {"": "a"}, 0, r"patience=2 .* eval_every=0 validates before .*; set --eval-every"),
        (dict(patience=2), {}, 1, r"patience=2 .* no held-out rows; set --data\.heldout"),
    ],
)
def test_a_metric_or_patience_that_cannot_be_is_refused(settings, sets, every, said):
    with pytest.raises(ValueError, match=said):
        ValidationConfig(**settings).choose_metric(sets, every)


def test_supervised_training_takes_no_samples():
    with pytest.raises(ValueError, match=r"validation\.samples=2 .* no rewards to score them by"):
        SftConfig(validation=ValidationConfig(samples=2))


def test_the_best_is_by_the_first_set_unless_a_metric_is_named():
    settings = ValidationConfig(samples=4)
    assert settings.choose_metric({"": "a", "b": "c"}, 0) == "heldout"
    assert settings.choose_metric({"b": "c"}, 0) == "heldout/b"
    assert ValidationConfig().choose_metric({"b": "c"}, 0, "_loss") == "heldout/b_loss"
    assert replace(settings, metric="heldout/b_pass_at_2").choose_metric({"b": "c"}, 0) == "heldout/b_pass_at_2"


def test_patience_takes_no_number_for_no_best():
    """A run that improves after a loss of NaN goes on; one that has lost its numbers ends."""
    score = Score("heldout_loss", -1)
    tell = lambda *losses: score.has_stalled([{"heldout_loss": loss} for loss in losses], 3)  # noqa: E731
    assert not tell(math.nan, 3.0, 2.0, 1.0)
    assert tell(3.0, 1.0, 2.0, math.nan, math.nan) and tell(*[math.nan] * 4)
