"""What an environment leaves in its episode: rewards, parts and answer, as plain values or a failure with its name."""

import json
from typing import Any, cast

import numpy as np
import pytest
from support.environments.runners import LocalPool, make_codec, make_rows, run_episodes

from rlworker.environments.episode import Episode
from rlworker.environments.parts import combine_parts
from rlworker.environments.reward import batch_reward, one_turn
from rlworker.rollouts.metrics import describe_trajectory, score_groups, summarise_groups
from rlworker.validation.estimates import estimate_majority

NO_NUMBERS = {
    "text": {"style": "good"},
    "none": {"style": None},
    "nan": {"style": float("nan")},
    "infinite": {"style": np.float32("inf")},
    "list": {"style": [1.0, 2.0]},
    "no dict": None,
    "a list of parts": [("style", 1.0)],
}
NUMBERS = {
    "float32": np.float32(0.5),
    "int64": np.int64(2),
    "bool": np.bool_(True),
    "no axis": np.array(0.25),
    "python": 1,
}


def play(**left: Any):
    """Play an episode whose environment leaves these attributes and a reward of 1: its trajectory."""

    async def environment(policy, row):
        episode = Episode(row)
        await policy.sample(episode)
        episode.reward(1)
        for name, value in left.items():
            setattr(episode, name, value)
        return episode

    return run_episodes(LocalPool(environment), make_rows("1+1="))[0]


@pytest.mark.parametrize("kind", NUMBERS)
def test_parts_that_numpy_made_are_numbers(kind):
    trajectory = play(parts={"style": NUMBERS[kind]})
    assert trajectory.parts == (("style", float(NUMBERS[kind])),) and type(trajectory.parts[0][1]) is float
    metrics = summarise_groups([[trajectory]])
    stored = json.loads(json.dumps([metrics, describe_trajectory(trajectory, make_codec())]))
    assert stored[0]["reward_style_mean"] == stored[1]["parts"]["style"] == float(NUMBERS[kind])


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_a_part_without_a_number_is_a_failed_episode_that_names_it(kind):
    trajectory = play(parts=NO_NUMBERS[kind])
    scores = score_groups([[trajectory]], make_codec())
    assert scores.failures == {"not_a_number": 1} and scores.values == [0.0]
    assert "Episode.parts" in scores.examples[0].message
    assert ("'style'" in scores.examples[0].message) == (NO_NUMBERS[kind] is not None)
    json.dumps([summarise_groups([[trajectory]]), describe_trajectory(trajectory, make_codec())], allow_nan=False)


def test_what_cannot_be_read_of_an_episode_ends_the_episode_alone():
    class Mute:
        def __str__(self):
            raise OSError("it has no text")

    for left in ({"rewards": None}, {"answer": Mute()}, {"rewards": [(0, "much")]}):
        assert play(**left).failure, left
    assert play(rewards=[(0, np.float32(0.5))]).rewards == ((0, 0.5),)


def test_no_answer_is_no_vote():
    """Of three samples two find nothing, and the third is right: it alone votes."""
    answers = iter([None, None, "2"])
    environment = one_turn(lambda text, row: 1.0, cast(Any, lambda text, row: next(answers)))
    found = run_episodes(LocalPool(environment), make_rows("1+1="), 3)
    assert sorted(one.answer for one in found) == ["", "", "2"]
    assert estimate_majority([one.answer for one in found], [one.answer == "2" for one in found], 3) == 1.0
    assert play(answer=None).answer == "" and play(answer=np.int64(7)).answer == "7"


@pytest.mark.parametrize("make", [one_turn, lambda scorer, answer: combine_parts({"right": scorer}, {}, answer=answer)])
def test_an_answer_function_that_raises_takes_the_vote_and_not_the_reward(make, caplog):
    def find(text, row):
        raise IndexError("no number")

    found = run_episodes(LocalPool(make(lambda text, row: 1.0, find)), make_rows("1+1="))[0]
    assert (found.failure, found.reward, found.answer) == (None, 1.0, "")
    assert "IndexError: no number" in caplog.text and "find" in caplog.text


def give_dict(text, row):
    return {"score": np.float32(0.5), "acc": True, "format": 1, "pred": text, "none": None}


def test_a_dict_with_a_score_is_read_as_verl_reads_it():
    """The score is the reward; its other numbers are parts, and what is no number is left out."""
    found = run_episodes(LocalPool(one_turn(cast(Any, give_dict))), make_rows("1+1="))[0]
    assert (found.failure, found.reward) == (None, 0.5)
    assert found.parts == (("acc", 1.0), ("format", 1.0))
    batch = batch_reward(cast(Any, lambda texts, rows: [give_dict(*each) for each in zip(texts, rows, strict=True)]))
    found = run_episodes(LocalPool(one_turn(batch)), make_rows("1+1="), 2)
    assert [one.reward for one in found] == [0.5, 0.5] and dict(found[1].parts) == {"acc": 1.0, "format": 1.0}
    combined = combine_parts({"verl": cast(Any, give_dict)}, {}, {"verl": 2.0})
    found = run_episodes(LocalPool(combined), make_rows("1+1="))[0]
    assert found.reward == 1.0 and dict(found.parts) == {"verl": 0.5, "verl_acc": 1.0, "verl_format": 1.0}


def test_a_dict_without_a_score_says_what_was_expected():
    found = run_episodes(LocalPool(one_turn(cast(Any, lambda text, row: {"reward": 1.0}))), make_rows("1+1="))[0]
    assert found.failure and found.failure[0] == "not_a_number"
    assert 'expected a number, or a dict that has it as "score"' in found.failure[1]
