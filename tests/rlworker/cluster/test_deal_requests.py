"""Which engine takes which requests."""

import numpy as np
import pytest
from support.rollout_workers import make_completions

from engines.batch.samples import Request, Sampling


def deal_runs(runs: list[tuple[int, list[float]]], engines: int, count: int = 1) -> list[list[int]]:
    """Deal runs of requests of one prompt: its length, and the expected length of a completion of each request."""
    from rlworker.cluster.rollout_group import deal_requests

    prompts = [(number, *range(length - 1)) for number, (length, _) in enumerate(runs)]
    pairs = zip(prompts, (expected for _, expected in runs), strict=True)
    settings = [(ids, Sampling(count, 1.0, 64, (0,), (), one)) for ids, many in pairs for one in many]
    return deal_requests([Request(*each) for each in settings], engines)


def deal(lengths: list[int], engines: int, expected: float, count: int = 4) -> list[list[int]]:
    return deal_runs([(length, [expected]) for length in lengths], engines, count)


@pytest.mark.parametrize("engines", [1, 2, 3, 5])
def test_every_request_goes_to_one_engine_in_order(engines):
    lengths = np.random.default_rng(0).integers(1, 500, 40).tolist()
    parts = deal(lengths, engines, 20.0)
    assert sorted(p for part in parts for p in part) == list(range(40))
    assert all(part == sorted(part) and part for part in parts)
    assert parts == deal(lengths, engines, 20.0), "dealt alike at any time"


def test_one_engine_takes_all_and_equal_requests_go_round():
    assert deal([5, 900, 1], 1, 10.0) == [[0, 1, 2]]
    assert deal([7] * 6, 2, 10.0) == [[0, 2, 4], [1, 3, 5]]
    assert deal([7], 2, 10.0) == [[0], []]


def test_long_prompts_are_spread_and_completions_count():
    """By hand: 100 to the first engine, 60 and 30 to the second, and the 10 to that one; where completions are long,
    each takes two."""
    assert deal([100, 60, 30, 10], 2, 0.0) == [[0], [1, 2, 3]]
    assert deal([100, 60, 30, 10], 2, 50.0) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_single_requests_of_one_prompt_go_as_its_completions_do(engines, count):
    lengths = np.random.default_rng(1).integers(1, 500, 40).tolist()
    parts = deal_runs([(length, [20.0] * count) for length in lengths], engines)
    prompts = deal(lengths, engines, 20.0, count)
    assert parts == [[p * count + i for p in part for i in range(count)] for part in prompts]


def test_what_each_request_is_expected_to_take_counts():
    """By hand: 5 + 90 to the first engine, and both others, 5 + 20 and 9 + 30, to the second."""
    assert deal_runs([(5, [5.0, 15.0]), (5, [90.0]), (9, [30.0])], 2) == [[2], [0, 1, 3]]
    assert deal_runs([(5, [1.0])], 2) == [[0], []]


@pytest.mark.parametrize("counts", [[2, 2, 2, 2, 2], [1, 3, 2, 1, 4]])
def test_answers_come_back_in_the_order_of_the_requests(counts):
    """Of engines with two, no and three requests; ids name request and completion."""

    from rlworker.cluster.rollout_group import restore_requests

    def name(request: int) -> list[list[int]]:
        return [[10 * request + i] * (1 + i) for i in range(counts[request])]

    parts = [[1, 4], [], [0, 2, 3]]
    answers = [
        make_completions(*[(ids, [-1.0] * len(ids), 3) for request in part for ids in name(request)])
        for part in parts
        if part
    ]
    restored = restore_requests(answers, parts, counts)
    assert [one.token_ids.tolist() for one in restored] == [ids for request in range(5) for ids in name(request)]


def test_equal_shares_are_neighbours_whatever_they_cost():
    """Three of five requests to the first of two engines, though the first one costs more than the others together."""

    from rlworker.cluster.rollout_group import Rollouts

    def ask(_, questions: dict) -> list:
        assert [len(requests) for requests, _ in questions.values()] == [3, 2]
        assert len({seed for _, seed in questions.values()}) == 2, "each engine has random numbers of its own"
        return [
            make_completions(*[([*one.token_ids[:1]], [-1.0], 0) for one in each]) for each, _ in questions.values()
        ]

    rollouts = object.__new__(Rollouts)  # without its processes
    rollouts.workers, rollouts._ask = [None, None], ask
    requests = [Request((number,) * (100 if number == 0 else 3), Sampling(1, 1.0, 4, (), ())) for number in range(5)]
    found = rollouts.sample(requests, (1,), equal_shares=True)
    assert [one.token_ids.tolist() for one in found] == [[number] for number in range(5)]
