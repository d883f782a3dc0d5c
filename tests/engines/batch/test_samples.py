"""Completions as columns, against the same completions one by one."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from engines.batch.samples import Completion, Completions

PARTS = [([5, 6, 7], [(1, 2), (2, 1)]), ([], [(1, 0)]), ([8], [(3, 1)]), ([9, 4], [(1, 1), (2, 0), (4, 1)])]


def make(logprobs: bool = True) -> list[Completion]:
    return [
        Completion(
            np.asarray(ids, np.int32),
            np.asarray([-i - 0.5 for i in ids] if logprobs else [], np.float32),
            number % 2 == 0,
            tuple(spans),
        )
        for number, (ids, spans) in enumerate(PARTS)
    ]


@pytest.mark.parametrize("logprobs", [True, False])
def test_columns_are_joined_cut_put_together_and_sorted(logprobs):
    single = make(logprobs)
    joined = Completions.join(single)
    assert len(joined) == 4 and list(joined) == single and joined[-1] == single[-1]
    for number, (ids, spans) in enumerate(PARTS):
        one = joined[number]
        assert one.token_ids.tolist() == ids and one.spans == tuple(spans) and one.version == spans[-1][0]
        assert one.logprobs.tolist() == ([-i - 0.5 for i in ids] if logprobs else [])
        assert one.finished == (number % 2 == 0) and one.token_ids.dtype == np.int32
    with pytest.raises(IndexError):
        joined[4]
    assert list(joined[1:3]) == single[1:3] and len(joined[3:1]) == 0
    assert list(joined[1::2]) == single[1::2] and list(joined[::-1]) == single[::-1]
    assert Completions.concatenate([joined[:1], joined[1:3], joined[3:]]) == joined
    assert list(joined.gather(np.array([3, 1, 0]))) == [single[3], single[1], single[0]]
    assert list(joined[1:].gather(np.array([2, 0]))) == [single[3], single[1]]
    assert joined[0].token_ids.base is not None, "a view"


def test_one_number_makes_the_difference():
    first, second, *_ = make()
    assert first != second and first != "text" and Completions.join([first]) != Completions.join([first, second])
    other = Completion(first.token_ids, first.logprobs, first.finished, ((1, 1), (2, 2)))
    assert other != first and Completions.join([other]) != Completions.join([first])


def test_columns_are_pickled_without_what_they_were_cut_from():
    one = Completion(np.arange(1000, dtype=np.int32), np.ones(1000, np.float32), True, ((0, 1000),))
    many = Completions.join([one] * 9)
    sent = pickle.dumps(many[2:3])
    assert len(sent) < 1000 * 8 + 2000 and pickle.loads(sent) == many[2:3]


def test_logprobs_or_the_likeliest_ids_of_some_completions_alone_are_refused():
    scored, greedy = make(True), make(False)
    with pytest.raises(ValueError, match=r"3 sampled ids and logprobs of 2, expected of all or of none"):
        Completions.join([greedy[2], scored[3]])
    with pytest.raises(ValueError, match="draw all completions of a round greedily or none"):
        Completions.concatenate([Completions.join(greedy), Completions.join(scored)])
    with pytest.raises(ValueError, match="1 of 2 parts have the logprobs of the likeliest ids, expected all or none"):
        Completions.join([make()[0], make_top()[2]])
    with pytest.raises(ValueError, match="draw all completions of a round with the same top_logprobs"):
        Completions.concatenate([Completions.join(make_top()), Completions.join(make())])


def make_top(top: int = 2) -> list[Completion]:
    found = []
    for one in make():
        ids = np.arange(top, dtype=np.int32) + 10 * one.token_ids[:, None]
        found.append(replace(one, top_ids=ids, top_logprobs=-ids.astype(np.float32)))
    return found


def test_the_likeliest_ids_stay_with_theirs():
    single = make_top()
    joined = Completions.join(single)
    assert joined.top_ids is not None and joined.top_ids.shape == (6, 2) and list(joined) == single
    assert joined[0].top_ids.tolist() == [[50, 51], [60, 61], [70, 71]] and joined[1].top_logprobs.shape == (0, 2)
    assert Completions.concatenate([Completions.join([]), joined[:1], joined[1:3], joined[3:]]) == joined
    assert list(joined.gather(np.array([3, 1, 0]))) == [single[3], single[1], single[0]]
    assert joined != Completions.join(make()) and joined[0] != make()[0]
    assert pickle.loads(pickle.dumps(joined[2:])) == joined[2:]


def test_no_completions_are_columns_too():
    none = Completions.join([])
    assert len(none) == 0 and list(none) == []
    assert Completions.concatenate([none, Completions.join(make())])[0] == make()[0]
