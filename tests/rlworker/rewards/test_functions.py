"""What can be a reward: refused before anything starts where it cannot, and read as a number where it returns one."""

import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import partial, wraps

import numpy as np
import pytest
import torch

from rlworker.config.run import RunConfig
from rlworker.data.rows import Row
from rlworker.episodes import one_turn
from rlworker.episodes.model import is_play
from rlworker.rewards.functions import batch_reward, check_reward, is_batch, read_number


def refuse(function) -> str:
    """Launch a run of this function, which must be refused; returns what is said."""
    from rlworker.trainers.launch import launch

    with pytest.raises(SystemExit) as end:
        launch(RunConfig(), function)
    return str(end.value.code)


async def reward(t, r):
    return 1.0


async def judge(text, row):
    return 1.0


async def judge_all(texts: list[str], rows):
    return [1.0]


async def rate(a, b) -> float:
    return 1.0


async def stream(model, row):
    yield 1.0


def score_like_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def score_like_trl(completions, **columns):
    return [1.0]


class Judge:
    batch = 8
    """Texts that it reads at once: no mark of ``batch_reward``."""

    def __call__(self, text, row):
        return 1.0

    def score_group(self, texts, rows):
        return [1.0] * len(texts)

    @classmethod
    def score(cls, text, row):
        return 1.0


class AsyncJudge:
    async def __call__(self, completion, row):
        return 1.0


ASYNC = {
    "reward": reward,
    "judge": judge,
    "judge_all": batch_reward(partial(judge_all)),
    "rate": rate,
    "stream": stream,
    "AsyncJudge": AsyncJudge(),
}


@pytest.mark.parametrize("name", ASYNC)
def test_an_async_reward_is_refused_by_name_before_anything_starts(name):
    """It is no play either, in which every episode would fail."""
    said = refuse(ASYNC[name])
    assert said.startswith(f"error: reward: {name} (") and "is async, and nobody awaits a reward; write `def re" in said
    assert "An environment that awaits samples and tools is a play: `async def play(model, row) -> Episode`" in said


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (None, r"reward: expected a function reward\(text, row\) -> float, got None"),
        (score_like_verl, r"score_like_verl \(.*\) is called as reward\(text, row\), which .*argument: 'ground_truth'"),
        (score_like_trl, r"score_like_trl \(.*\) is called as reward\(text, row\), which .*too many positional"),
        (Judge, r"Judge is called as reward\(text, row\), which it does not take"),
        (batch_reward(lambda texts: texts), r"is called as reward\(texts, rows\), which it does not take"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_anything_starts(function, said):
    assert re.search(said, refuse(function))


def test_a_play_of_other_arguments_is_refused_before_anything_starts():
    async def play(model):
        return None

    assert re.search(r"error: play: .*play \(.*\) is called as play\(model, row\), which it does", refuse(play))


@wraps(score_like_verl)
def wrapped(text, row):
    return score_like_verl("gsm8k", text, row.answer)


BOUND = partial(score_like_verl, "gsm8k", extra_info={})


@pytest.mark.parametrize("function", [Judge(), Judge.score, Judge().score, max, BOUND, wrapped])
def test_whatever_takes_a_text_and_its_row_is_a_reward(function):
    check_reward(function)
    assert not is_play(function) and not is_batch(function)


def test_a_play_is_told_by_being_async():
    async def score(model, row):
        return None

    async def episode(m, r):
        return None

    assert is_play(score) and is_play(episode) and is_play(partial(score)) and is_play(one_turn(Judge()))
    with pytest.raises(ValueError, match="is async"):
        one_turn(judge)


def test_methods_and_partials_of_batch_rewards_are_batch_rewards():
    marked = batch_reward(Judge().score_group)
    assert is_batch(marked) and marked(["a", "b"], []) == [1.0, 1.0] and is_batch(partial(partial(marked, rows=[])))
    with pytest.raises(ValueError, match="a batch reward sees a prompt's whole group"):
        one_turn(partial(marked))


def test_a_number_is_what_float_takes_but_for_text():
    numbers = [True, np.float32(0.5), np.array([[2]]), Decimal("0.1"), Fraction(1, 3), math.inf]
    numbers += [torch.tensor([3.0], requires_grad=True), torch.tensor(1.5, dtype=torch.bfloat16)]
    assert [read_number(value) for value in numbers] == [1.0, 0.5, 2.0, 0.1, 1 / 3, math.inf, 3.0, 1.5]
    others = [None, "1", b"1", np.str_("1"), {}, 1 + 0j, 10**400, Decimal("sNaN"), torch.tensor([1.0, 2.0]), math.nan]
    assert all(math.isnan(read_number(value)) for value in others)


def test_a_row_that_is_drawn_twice_has_two_groups():
    """A batch reward is called for each group of a prompt, also where the next is of the same row."""
    from types import SimpleNamespace

    from support.rollout_workers import make_completions

    from rlworker.rewards.worker import find_call_bounds
    from rlworker.rollouts.scoring import score_completions

    bounds = []

    def score(texts, rows):
        from rlworker.rewards.pool import Scores

        places: dict[int, int] = {}
        bounds.extend(find_call_bounds([places.setdefault(id(row), len(places)) for row in rows], batch=True))
        return Scores([0.0] * len(texts), {}, [])

    row = Row("1+1=", (1, 2), "2", {})
    completions = make_completions(*[([20, 2], [-1.0, -1.0], 0)] * 6)
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: ["2"] * len(ids))
    groups, _ = score_completions(tokenizer, SimpleNamespace(score=score), [row, row], completions)
    assert bounds == [0, 3, 6] and all(group.row is row for group in groups)
