"""Bounds that stand in annotations: what they are, what keeps them and how they are said."""

from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

from engines.validation import FINITE, LARGEST, check_types, collect_bounds, is_within, spell_bounds

INF = float("inf")


@pytest.mark.parametrize(
    ("kind", "words", "inside", "outside"),
    [
        (Annotated[int, Ge(1)], "at least 1", (1, 10**30), (0, -1)),
        (Annotated[int, Ge(0)], "0 or more", (0, 5), (-1,)),
        (Annotated[int, Ge(0), Le(7)], "from 0 to 7", (0, 7), (-1, 8)),
        (Annotated[int, Interval(ge=2, le=7)], "from 2 to 7", (2, 7), (1, 8)),
        (Annotated[float, Interval(gt=0, lt=1)], "above 0 and below 1", (0.5, 1e-300), (0, 1)),
        (Annotated[float, Ge(0), Lt(1)], "at least 0 and below 1", (0, 0.999), (-1e-300, 1)),
        (Annotated[float, Le(3)], "at most 3", (3, -INF), (3.1,)),
        (Annotated[float, Gt(0), FINITE], "above 0 and finite", (1e-300, LARGEST), (0, INF, 10**400)),
        (Annotated[float, Ge(0), FINITE], "finite and not negative", (0, LARGEST), (-1e-300, INF)),
        (Annotated[float, Ge(-LARGEST), FINITE], "finite", (-LARGEST, 0, LARGEST), (-INF, INF, -(10**400))),
        (Annotated[float, Ge(0)] | None, "0 or more", (0, INF), (-1.0,)),
    ],
)
def test_bounds_hold_and_are_said_in_words(kind, words, inside, outside):
    bounds = collect_bounds(kind)
    assert spell_bounds(bounds) == words
    assert all(is_within(bounds, value) for value in inside)
    assert not any(is_within(bounds, value) for value in outside)


@pytest.mark.parametrize("kind", [int, float | None, str, Annotated[int, "a note"], tuple[int, ...]])
def test_other_annotations_set_no_bounds(kind):
    assert collect_bounds(kind) == {}


@dataclass(frozen=True)
class Section:
    count: Annotated[int, Ge(1)] = 1
    share: Annotated[float, Gt(0)] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self):
        check_types("actor.part", self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, r"^actor\.part: count must be at least 1, got 0; change --actor\.part\.count$"),
        ({"count": 1.5}, r"^actor\.part: count must be a whole number, got 1\.5; change --actor\.part\.count$"),
        ({"share": 0.0}, r"^actor\.part: share must be above 0, got 0\.0; change --actor\.part\.share$"),
        ({"share": "x"}, r"^actor\.part: share must be a number or null, got 'x'; change --actor\.part\.share$"),
        ({"names": (1,)}, r"^actor\.part: names must be a list \(text\), got \(1,\); change --actor\.part\.names$"),
    ],
)
def test_a_field_keeps_type_and_bounds(values, message):
    with pytest.raises(ValueError, match=message):
        Section(**values)
    assert Section(count=3, share=None).count == 3
