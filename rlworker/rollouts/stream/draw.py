"""Groups that are drawn together, and what can draw them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.batch.samples import Completions, Sampling
from rlworker.data.rows import Row
from rlworker.rewards.pool import Scores
from rlworker.rollouts.to_batch import Group


@dataclass(eq=False)
class Draw:
    """The groups of some rows, each of ``sampling.count`` samples or episodes, as they come.

    Attributes:
        number: unique among all draws. goes_first: before everything that has not begun.
        groups: ``[P]``, None where one has not come. scores: of parts of it, in any order.
        is_forgotten: nobody waits for it any more.
    """

    number: int
    rows: Sequence[Row]
    sampling: Sampling
    goes_first: bool = False
    groups: list[Any] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    is_forgotten: bool = False

    def __post_init__(self):
        self.groups = [None] * len(self.rows)
        self._missing = len(self.rows)

    def add(self, place: int, group: Any) -> None:
        """Take in the group of a row."""
        self.groups[place] = group
        self._missing -= 1

    @property
    def is_done(self) -> bool:
        return self._missing == 0


Finished = tuple[Draw, int, Group | Completions]
"""A draw, the place of a row in it, and its group."""


class Drawer(Protocol):
    """Draws groups with what engines sample. One thread uses it."""

    def begin(self, draw: Draw) -> None:
        """Begin a draw."""
        ...

    def take(self, draw: Draw, key: tuple, completions: Completions) -> None:
        """Take what was sampled for a key of a draw; all begin with its number."""
        ...

    def advance(self) -> list[Finished]:
        """Do what can be done without waiting; returns the groups that have become whole."""
        ...

    @property
    def references(self) -> Sequence[Any]:
        """Ray's references of what it waits for."""
        ...

    def forget(self) -> None:
        """Forget all draws."""
        ...

    def close(self) -> None: ...
