"""Completions are equal where every number is, and the same after a process border."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from engines.batch.samples import Completion

ONE = Completion(
    np.asarray([5, 6, 7], np.int32),
    np.asarray([-0.5, -1.5, -2.5], np.float32),
    True,
    ((1, 2), (2, 1)),
    np.asarray([[5, 8], [6, 8], [9, 7]], np.int32),
    np.asarray([[-0.5, -1], [-1.5, -2], [-2, -2.5]], np.float32),
)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.asarray([5, 6, 8], np.int32)},
        {"token_ids": ONE.token_ids[:2]},
        {"logprobs": np.asarray([-0.5, -1.5, -2.4], np.float32)},
        {"logprobs": np.zeros(0, np.float32)},
        {"finished": False},
        {"spans": ((1, 1), (2, 2))},
        {"spans": ((1, 3),)},
        {"top_ids": None, "top_logprobs": None},
        {"top_ids": ONE.top_ids + 1},
    ],
    ids=lambda change: " ".join(change),
)
def test_one_number_makes_the_difference(change):
    other = replace(ONE, **change)
    assert other != ONE and other != ONE and [other] != [ONE]
    assert other == replace(ONE, **change) and pickle.loads(pickle.dumps([other])) == [other]


def test_a_completion_is_no_text_and_has_the_version_of_its_end():
    assert ONE != "text" and pickle.loads(pickle.dumps(ONE)) == ONE and ONE.version == 2
