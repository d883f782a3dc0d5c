"""What can be a scorer: refused before anything starts where it cannot, else the one-turn environment that calls it."""

import asyncio
import math
import multiprocessing
import os
import re
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import partial, wraps

import numpy as np
import pytest
import torch
from support.environments.runners import LIMITS, Engines, LocalPool, make_loop, make_rows, run_episodes, tell

from engines.batch.samples import Sampling
from rlworker.config.run import RunConfig
from rlworker.config.sections import EnvironmentConfig
from rlworker.environments import Episode, one_turn
from rlworker.environments.episode import read_number
from rlworker.environments.parts import combine_parts
from rlworker.environments.processes.trial import try_rewards
from rlworker.environments.reward import OneTurn, batch_reward, is_batch, is_run_once, make_environment

PATIENT = replace(LIMITS, time_limit_s=20.0)


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


async def stream(policy, row):
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


@pytest.mark.parametrize("scorer", [reward, judge, rate, AsyncJudge()])
def test_an_async_scorer_is_told_from_an_environment_and_awaited(scorer):
    environment = make_environment(scorer)
    assert isinstance(environment, OneTurn) and environment.samples_first
    (trajectory,) = run_episodes(LocalPool(environment), make_rows("1="))
    assert trajectory.failure is None and trajectory.reward == 1.0


def test_async_scorers_wait_side_by_side():
    begun = []

    async def judge(text, row):
        begun.append(row.prompt)
        while len(begun) < 4:  # without end, were they called one after another
            await asyncio.sleep(0.001)
        return float(row.prompt)

    found = run_episodes(LocalPool(make_environment(judge), limits=PATIENT), make_rows("1", "2"), 2)
    assert [one.reward for one in found] == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (None, r"reward: expected a function reward\(text, row\) -> float, got None"),
        (score_like_verl, r"score_like_verl \(.*\) cannot be called as reward\(text, row\) .*argument: 'ground_truth'"),
        (score_like_trl, r"score_like_trl \(.*\) cannot be called as reward\(text, row\) .*too many positional"),
        (Judge, r"Judge cannot be called as reward\(text, row\)"),
        (batch_reward(partial(judge_all)), "judge_all .* is async and a batch reward"),
        (stream, "stream .* is an async generator, and a scorer returns one number"),
        (lambda policy, row: None, r"environment: .* takes a policy and is not async; write `async def environment"),
        (batch_reward(lambda texts: texts), r"cannot be called as reward\(texts, rows\)"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_anything_starts(function, said):
    assert re.search(said, refuse(function))


def test_an_environment_of_other_arguments_is_refused_before_anything_starts():
    async def walk(policy):
        return None

    said = r"error: environment: .*walk \(.*\) cannot be called as environment\(policy, row\)"
    assert re.search(said, refuse(walk))


@wraps(score_like_verl)
def wrapped(text, row):
    return score_like_verl("gsm8k", text, row.answer)


BOUND = partial(score_like_verl, "gsm8k", extra_info={})


@pytest.mark.parametrize("function", [Judge(), Judge.score, Judge().score, max, BOUND, wrapped])
def test_what_takes_a_text_and_its_row_is_a_scorer(function):
    assert isinstance(make_environment(function), OneTurn) and not is_batch(function)


def test_an_environment_is_told_by_being_async():
    async def score(policy, row):
        return None

    async def episode(m, r):
        return None

    for environment in (score, episode, partial(score), one_turn(Judge())):
        assert make_environment(environment) is environment


def test_methods_and_partials_of_batch_rewards_are_batch_rewards():
    marked = batch_reward(Judge().score_group)
    assert is_batch(marked) and marked(["a", "b"], []) == [1.0, 1.0] and is_batch(partial(partial(marked, rows=[])))


@batch_reward
def rank(texts, rows):
    calls.append((list(texts), [row.prompt for row in rows]))
    return range(len(texts))


calls: list = []


def test_environments_and_scorers_say_that_they_run_once():
    class Player:
        runs_once = True

        async def __call__(self, policy, row): ...

    def pay(text, row): ...

    def count(text, row): ...

    pay.runs_once = True
    for environment in (Player(), partial(Player()), one_turn(pay), combine_parts({"count": count, "pay": pay}, {})):
        assert is_run_once(environment), environment
    for environment in (one_turn(count), partial(count), combine_parts({"count": count}, {})):
        assert not is_run_once(environment), environment


def test_a_batch_scorer_is_called_once_for_each_group():
    """Also where the next group is of the same row; the engines are asked once for all samples of a prompt."""
    (row,) = make_rows("1=")
    calls.clear()
    pool, engines = LocalPool(make_environment(rank), 2), Engines()
    loop = make_loop(pool, engines)
    groups = loop.wait(loop.begin([row, row, row], Sampling(3, 1.0, 8, (7, 0, 0), (2,))))
    assert [[one.reward for one in group] for group in groups] == [[0.0, 1.0, 2.0]] * 3
    assert calls == [(["~2"] * 3, ["1="] * 3)] * 3
    assert [request.sampling.count for request in engines.requests[0]] == [3, 3, 3] and engines.streams == [(7, 0, 0)]


def test_a_scorer_is_the_environment_that_one_would_write():
    """The same trajectories, by one message to a process in the place of two."""

    def length(text, row):
        return len(text) + len(row.prompt) / 8

    async def written(policy, row):
        episode = Episode(row)
        sample = await policy.sample(episode)
        episode.reward(length(sample.text, row))
        return episode

    rows, pools = make_rows("1=", "12=", "123="), [LocalPool(make_environment(each)) for each in (length, written)]
    one, other = (run_episodes(pool, rows, 2) for pool in pools)
    assert [(tell(a), a.rewards, a.failure) for a in one] == [(tell(b), b.rewards, b.failure) for b in other]
    assert [len(pool.messages) for pool in pools] == [1, 2]


def test_a_scorer_may_run_an_event_loop_of_its_own():
    def score(text, row):
        return asyncio.run(reward(text, row))

    (trajectory,) = run_episodes(LocalPool(make_environment(score)), make_rows("1="))
    assert trajectory.failure is None and trajectory.reward == 1.0


def test_a_number_is_what_float_takes_but_for_text():
    numbers = [True, np.float32(0.5), np.array([[2]]), Decimal("0.1"), Fraction(1, 3), math.inf]
    numbers += [torch.tensor([3.0], requires_grad=True), torch.tensor(1.5, dtype=torch.bfloat16)]
    assert [read_number(value) for value in numbers] == [1.0, 0.5, 2.0, 0.1, 1 / 3, math.inf, 3.0, 1.5]
    others = [None, "1", b"1", np.str_("1"), {}, 1 + 0j, 10**400, Decimal("sNaN"), torch.tensor([1.0, 2.0]), math.nan]
    assert all(math.isnan(read_number(value)) for value in others)


def return_none(text, row):
    return None


def return_dict(text, row):
    return {"reward": 1.0}


def return_text(text, row):
    return "1.0"


async def reward_none(text: str, row) -> None:
    return None


@batch_reward
def rate_too_few(texts, rows):
    return [1.0] * (len(texts) - 1)


def raise_on_all(text, row):
    raise KeyError("ground_truth")


def rate_nan(text, row):
    return float("nan")


def end_process(text, row):
    os._exit(3)


def sleep_long(text, row):
    time.sleep(600)


def rate_like_verl(text, row):
    print("printed in the trial")
    return {"score": float(text == row.answer == "2" and row.prompt == "1+1="), "acc": True}


def try_reward(scorer, folder, time_limit_s: float = 60.0, **settings) -> None:
    """Try a reward on a row of a file in ``folder``. The limit is reached by a reward that hangs, on a busy machine
    too."""
    (folder / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}')
    config = RunConfig(environment=EnvironmentConfig(time_limit_s=time_limit_s), samples_per_prompt=3, **settings)
    try_rewards(make_environment(scorer), config, [str(folder / "rows.jsonl")], folder / "environment.log")


@pytest.mark.parametrize("scorer", [return_none, return_dict, return_text, reward_none, rate_too_few])
def test_a_reward_that_returns_no_number_is_refused_before_anything_starts(scorer, tmp_path):
    with pytest.raises(ValueError) as error:
        try_reward(scorer, tmp_path)
    message = str(error.value)
    assert "rows.jsonl, line 1" in message and "test_reward.py:" in message and "returned " in message
    assert "expected a number" in message or "2 numbers for 3 texts" in message
    assert ('"score"' in message) == (scorer is return_dict)


@pytest.mark.parametrize("scorer", [raise_on_all, rate_nan, end_process, sleep_long])
def test_a_reward_that_fails_on_a_rows_answer_is_a_warning(scorer, tmp_path, caplog):
    """It may have one for other texts, and a failed call is an episode's outcome."""
    try_reward(scorer, tmp_path, time_limit_s=0.3 if scorer is sleep_long else 60.0)
    said = {raise_on_all: "KeyError: 'ground_truth'", rate_nan: "returned nan", end_process: "ended its process"}
    assert said.get(scorer, "did not return in 0.3 s") in caplog.text and "a failed episode" in caplog.text


def test_a_trial_leaves_nothing_in_the_process_of_the_run(tmp_path, caplog):
    calls = []

    def count(text, row):
        calls.append(row)
        return 1.0

    try_reward(count, tmp_path)
    try_reward(rate_like_verl, tmp_path)
    try_reward(combine_parts({"verl": rate_like_verl, "other": count}, {}), tmp_path)
    assert not calls and not caplog.text and (tmp_path / "environment.log").read_text().count("printed") == 2
    with pytest.raises(ValueError, match="return_none"):
        try_reward(combine_parts({"verl": rate_like_verl, "none": return_none}, {}), tmp_path)


def test_a_tried_reward_may_start_processes_which_end_with_it(tmp_path, caplog):
    """As math-verify does; one that hangs is ended with what it started."""

    def start(text, row):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        (tmp_path / "pid").write_text(str(process.pid))
        return 1.0

    try_reward(start, tmp_path)
    assert not caplog.text
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.05)


def test_an_environment_is_not_tried(tmp_path):
    async def play(policy, row):
        raise AssertionError("it is called")

    try_reward(play, tmp_path)
