"""Unbiased estimates of pass@k and maj@k from n samples of a prompt, k of which are drawn without replacement."""

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np


def estimate_pass(right: Sequence[bool], size: int) -> float:
    """Estimate pass@k, the probability that at least one of ``size`` samples is right, from n >= ``size`` samples.

    It is ``1 - C(n - c, k) / C(n, k)`` for ``c`` right samples of ``n`` (Chen et al. 2021, arXiv:2107.03374, equation
    1), without bias.

    Args:
        right: ``[n]``, whether each sample is right. size: k.
    """
    wrong = len(right) - sum(right)
    return 1 - comb(wrong, size) / comb(len(right), size)


def estimate_majority(answers: Sequence[str], right: Sequence[bool], size: int) -> float:
    """Estimate maj@k, the probability that the most frequent answer of ``size`` samples is right.

    It is the mean over all subsets of ``size`` samples (Wang et al. 2023, arXiv:2203.11171). Answers with equally many
    votes win equally often.

    Args:
        answers: ``[n]``, answer of each sample; an empty answer is no vote.
        right: ``[n]``, whether each sample is right. If samples with the same answer differ, the answer counts by the
            share that is right.
        size: k.
    """
    votes = Counter(answer for answer in answers if answer)
    rights = Counter(answer for answer, is_right in zip(answers, right, strict=True) if answer and is_right)
    silent, counts, found = len(answers) - votes.total(), list(votes.values()), 0.0
    for own in set(counts):  # answers with as many samples win as often
        others = counts.copy()
        others.remove(own)
        share = sum(rights[answer] / own for answer, count in votes.items() if count == own)
        found += share * _count_wins(own, others, silent, size) if share else 0.0
    return found / comb(len(answers), size)


def _count_wins(own: int, others: Sequence[int], silent: int, size: int) -> float:
    """Count the subsets of ``size`` samples in which an answer of ``own`` samples has most votes, a tie as its share.

    Args:
        others: samples of each other answer. silent: samples without one.
    """
    wins = 0.0
    for drawn in range(1, min(own, size) + 1):
        left = size - drawn
        ways = np.zeros((left + 1, len(others) + 1))  # [samples of others, of which so many answers tie]
        ways[0, 0] = 1
        for count in others:
            before, ways = ways, np.zeros_like(ways)
            for votes in range(min(count, drawn, left) + 1):
                ties = int(votes == drawn)
                ways[votes:, ties:] += comb(count, votes) * before[: left + 1 - votes, : len(others) + 1 - ties]
        rest = np.array([comb(silent, left - voted) for voted in range(left + 1)], np.float64)
        wins += comb(own, drawn) * float(rest @ ways @ (1 / np.arange(1, len(others) + 2)))
    return wins
