"""pass@k and maj@k against every subset of the samples."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlworker.config.validation import ValidationConfig, list_sizes
from rlworker.validation.estimates import estimate_majority, estimate_pass


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def vote(answers, shares) -> float:
    """How often the answer with most votes is right, each of those that tie as often."""
    votes = Counter(answer for answer in answers if answer)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return mean(shares[answer] for answer in winners) if winners else 0.0


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(samples):
    """Of every number of right samples and every k."""
    for right in range(samples + 1):
        marks = [place < right for place in range(samples)]
        for size in range(1, samples + 1):
            expected = mean(any(subset) for subset in combinations(marks, size))
            assert estimate_pass(marks, size) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_maj_at_k_is_the_mean_over_all_subsets(answers, data):
    """Votes tie, samples give no answer, and some answers are right in one sample and wrong in another."""
    right = data.draw(st.lists(st.booleans(), min_size=len(answers), max_size=len(answers)))
    shares = {a: mean(r for b, r in zip(answers, right) if a == b) for a in set(answers)}
    for size in range(1, len(answers) + 1):
        expected = mean(vote(subset, shares) for subset in combinations(answers, size))
        assert estimate_majority(answers, right, size) == pytest.approx(expected, abs=1e-12)


def test_many_samples_that_all_differ_are_quick_to_vote():
    answers = [str(number) for number in range(128)]
    assert estimate_majority(answers, [n < 32 for n in range(128)], 64) == pytest.approx(0.25, abs=1e-9)


def test_sizes_double_up_to_the_number_of_samples():
    assert [list_sizes(n) for n in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_estimates_of_the_most_samples_are_numbers():
    """C(1024, 512) is the largest number of subsets that a float holds; further samples are refused."""
    right = [place % 2 == 0 for place in range(1024)]
    assert estimate_pass(right, 512) == 1.0
    answers = ["4" if each else "5" for each in right]
    assert estimate_majority(answers, right, 512) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="samples"):
        ValidationConfig(samples=1030)
