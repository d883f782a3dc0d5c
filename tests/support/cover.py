"""Matrix tests: from a table of factors to the cases that each run of the suite takes.

A fault mostly needs one or two things to come together: a layout and a parallel size, say, whatever the family is. So
the default run takes few cases in which every PAIR of values of two factors still meets, CI adds pairs of heavy cases,
and of cheap tests those in which every TRIPLE meets (``-m large``). ``-m product`` runs what is left::

    @matrix({"size": ("one", "TP2", "CP2"), "layout": ("bshd", "thd"), "recompute": ("none", "full")}, triples=True)
    def test_parity(size, layout, recompute): ...   # 12 cases: 6 by default, 6 large, none left

Cases are chosen greedily, as in AETG (Cohen et al. 1997) but without its chance, so that they change only when the
table does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations, product
from operator import or_
from typing import Any

import pytest

Case = tuple[Any, ...]
"""A value for each factor, in the order of the table."""


@dataclass(frozen=True)
class Matrix:
    """A table of factors, and which cases of its product there can be.

    Attributes:
        factors: values by the name of their factor. Values are hashable, and ``str`` tells those of a factor apart.
        allowed: says of ``{factor: value}`` whether there is such a case.
        whole: every run takes all cases: they take milliseconds each, or something else relies on every one of them.
        heavy: says of ``{factor: value}`` whether the case takes seconds: it is ``large``, though a pair may meet in no
            other case.
        is_of_triples: CI takes cases in which every triple meets. Without, it takes those of every pair.
    """

    factors: Mapping[str, Sequence[Any]]
    allowed: Callable[[dict[str, Any]], bool] = lambda case: True
    whole: bool = False
    heavy: Callable[[dict[str, Any]], bool] = lambda case: False
    is_of_triples: bool = False

    @cached_property
    def cases(self) -> list[Case]:
        """Allowed cases of the product, the last factor changing fastest."""
        cases = product(*self.factors.values())
        return [case for case in cases if self.allowed(dict(zip(self.factors, case, strict=True)))]

    @cached_property
    def light_cases(self) -> list[Case]:
        """Cases that the default run may take."""
        return [case for case in self.cases if not self.heavy(dict(zip(self.factors, case, strict=True)))]

    @cached_property
    def pairs(self) -> dict[Case, int]:
        """Case -> pairs of two factors' values that it has: a set of them, as the bits of a number."""
        return self._number_combinations(2)

    @cached_property
    def triples(self) -> dict[Case, int]:
        """Case -> triples of three factors' values that it has, as the bits of a number."""
        return self._number_combinations(3)

    def _number_combinations(self, strength: int) -> dict[Case, int]:
        bits: dict[tuple, int] = {}
        # A table of fewer factors than that has nothing finer than its cases.
        groups = list(combinations(range(len(self.factors)), min(strength, len(self.factors))))
        sets = {}
        for case in self.cases:
            values = ((group, tuple(case[factor] for factor in group)) for group in groups)
            sets[case] = sum(1 << bits.setdefault(combination, len(bits)) for combination in values)
        return sets

    def cover(
        self, wanted: Mapping[Case, int], start: Sequence[Case] = (), among: Sequence[Case] | None = None
    ) -> list[Case]:
        """Choose cases that have between them every combination of ``wanted``, which is ``pairs`` or ``triples``.

        The next case is the one that brings most combinations which have not met yet. Of equals it is the one with
        most new triples, so that what pairs leave open spreads over the table; then the first of the product.

        Args:
            start: cases that are taken in any event, and come first in the result. among: cases to choose from, None
                is all; combinations that none of them has are left out.
        """
        cases, among = list(start), self.cases if among is None else among
        missing = reduce(or_, (wanted[case] for case in among), 0) & ~reduce(or_, (wanted[case] for case in start), 0)
        missing_triples = ~reduce(or_, (self.triples[case] for case in start), 0)
        while missing:
            gains = {case: (wanted[case] & missing).bit_count() for case in among}
            best_gain = max(gains.values())
            equals = (case for case, gain in gains.items() if gain == best_gain)
            case = max(equals, key=lambda case: (self.triples[case] & missing_triples).bit_count())
            cases.append(case)
            missing &= ~wanted[case]
            missing_triples &= ~self.triples[case]
        return cases

    def make_params(self) -> list:
        """Make pytest's parameters of every case.

        Cases of the pairs are bare, what CI adds is marked ``large``, the rest ``product``.

        They stand in the order of the product: where the first factor is what is expensive to change, neighbours share
        it.
        """
        pairs = self.cases if self.whole else self.cover(self.pairs, among=self.light_cases)
        in_ci = self.cover(self.triples if self.is_of_triples else self.pairs, start=pairs)
        marks = dict.fromkeys(in_ci, pytest.mark.large) | dict.fromkeys(pairs, ())
        return [
            pytest.param(*case, marks=marks.get(case, pytest.mark.product), id="-".join(map(str, case)))
            for case in self.cases
        ]


def in_turn(cases: Iterable[Case], values: Iterable[Any]) -> list:
    """Make pytest's parameters of cases by the values of further factors: CI runs each case with one value, in turn.

    The rest is marked ``product``. A value of several factors is a tuple.
    """
    values = [_as_tuple(value) for value in values]
    marks = (pytest.mark.large, *[pytest.mark.product] * (len(values) - 1))
    return [
        pytest.param(*_as_tuple(case), *value, marks=marks[(place - number) % len(values)])
        for number, case in enumerate(cases)
        for place, value in enumerate(values)
    ]


def in_runs(default: Iterable[Any] = (), large: Iterable[Any] = (), product: Iterable[Any] = ()) -> list:
    """Make pytest's parameters of cases by the run that takes them. A case of one argument needs no tuple."""
    runs = ((), default), (pytest.mark.large, large), (pytest.mark.product, product)
    return [pytest.param(*_as_tuple(case), marks=marks) for marks, cases in runs for case in cases]


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def matrix(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[dict[str, Any]], bool] = lambda case: True,
    *,
    whole: bool = False,
    heavy: Callable[[dict[str, Any]], bool] = lambda case: False,
    triples: bool = False,
):
    """Parametrize a test over a table of factors: it takes an argument of each factor's name.

    The test keeps its table as ``.matrix``, by which ``test_cover.py`` finds it and counts what it leaves out.
    """
    table = Matrix(factors, allowed, whole, heavy, triples)

    def decorate(test):
        test.matrix = table
        return pytest.mark.parametrize(list(factors), table.make_params())(test)

    return decorate
