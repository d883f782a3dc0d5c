"""Which engine takes which prompts, and which requests."""

import numpy as np
import pytest

from engines.batch.samples import Prompt, Request, Sampling


def deal(lengths: list[int], engines: int, expected: float, count: int = 4) -> list[list[int]]:
    from rlworker.cluster.rollout_group import deal_prompts

    return deal_prompts(lengths, Sampling(count, 1.0, 64, (0,), (), expected), engines)


@pytest.mark.parametrize("engines", [1, 2, 3, 5])
def test_every_prompt_goes_to_one_engine_in_order(engines):
    lengths = np.random.default_rng(0).integers(1, 500, 40).tolist()
    parts = deal(lengths, engines, 20.0)
    assert sorted(p for part in parts for p in part) == list(range(40))
    assert all(part == sorted(part) and part for part in parts)
    assert parts == deal(lengths, engines, 20.0), "dealt alike at any time"


def test_one_engine_takes_all_and_equal_prompts_go_round():
    assert deal([5, 900, 1], 1, 10.0) == [[0, 1, 2]]
    assert deal([7] * 6, 2, 10.0) == [[0, 2, 4], [1, 3, 5]]
    assert deal([7], 2, 10.0) == [[0], []]


def test_long_prompts_are_spread_and_completions_count():
    """By hand: 100 to the first engine, 60 and 30 to the second, and the 10 to that one; where completions are long,
    each takes two."""
    assert deal([100, 60, 30, 10], 2, 0.0) == [[0], [1, 2, 3]]
    assert deal([100, 60, 30, 10], 2, 50.0) == [[0, 3], [1, 2]]


def deal_runs(runs: list[tuple[int, list[float]]], engines: int) -> list[list[int]]:
    from rlworker.cluster.rollout_group import deal_requests

    prompts = [Prompt((number, *range(length - 1))) for number, (length, _) in enumerate(runs)]
    pairs = zip(prompts, (expected for _, expected in runs), strict=True)
    return deal_requests([Request(prompt, 1.0, 64, (), one) for prompt, many in pairs for one in many], engines)


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_requests_of_one_prompt_go_as_its_completions_do(engines, count):
    lengths = np.random.default_rng(1).integers(1, 500, 40).tolist()
    parts = deal_runs([(length, [20.0] * count) for length in lengths], engines)
    prompts = deal(lengths, engines, 20.0, count)
    assert parts == [[p * count + i for p in part for i in range(count)] for part in prompts]


def test_what_each_request_is_expected_to_take_counts():
    """By hand: 5 + 90 to the first engine, and both others, 5 + 20 and 9 + 30, to the second."""
    assert deal_runs([(5, [5.0, 15.0]), (5, [90.0]), (9, [30.0])], 2) == [[2], [0, 1, 3]]
    assert deal_runs([(5, [1.0])], 2) == [[0], []]


def test_answers_come_back_in_the_order_of_the_prompts():
    """Of engines with two, no and three prompts, with two completions of each; ids name prompt and completion."""
    from support.rollout_workers import make_completions

    from rlworker.cluster.rollout_group import restore_prompts

    parts, count = [[1, 4], [], [0, 2, 3]], 2
    answers = [
        make_completions(*[([10 * prompt + i] * (1 + i), [-1.0] * (1 + i), 3) for prompt in part for i in range(count)])
        for part in parts
        if part
    ]
    restored = restore_prompts(answers, parts, count)
    assert [one.token_ids.tolist() for one in restored] == [
        [10 * prompt + i] * (1 + i) for prompt in range(5) for i in range(count)
    ]
