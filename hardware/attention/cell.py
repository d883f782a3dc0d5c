"""A cell of the capability table, which is one attention backend and one rule; and the form of a planted fault."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Evidence = Literal["executed", "emulated", "untested"]

Patch = tuple[object, str, Callable]
"""``(owner, attribute, wrap)`` of a planted fault: the attribute becomes ``wrap(original)``. Owners are modules and
classes."""


@dataclass(frozen=True)
class Cell:
    """One backend and one rule, in one layout, with or without context parallelism.

    Attributes:
        honoured: whether the backend computes the rule.
        text: the arguments by which the backend computes the rule, or the reason why it is refused.
        nearest: for a refused cell, the nearest rule or layout that works.
        composes: whether the rule is passed as an arbitrary mask, so that it can be combined with other such rules.
        evidence: level of proof: executed, emulated or untested.
        has_stand_in: for a refused cell, whether the backend computes something in the rule's place, which an override
            can then use.
    """

    honoured: bool
    text: str
    nearest: str = ""
    composes: bool = False
    evidence: Evidence = "untested"
    has_stand_in: bool = True
