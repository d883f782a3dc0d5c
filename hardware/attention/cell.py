"""A cell of the capability table, one attention backend and one rule; and the form of a planted fault."""

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
        honoured: the backend computes the rule, by the arguments in ``text``; else ``text`` is the reason of refusal.
        nearest: of a refused cell, the nearest rule or layout that works.
        composes: the rule is passed as an arbitrary mask, so it can be combined with other rules of this kind.
        evidence: level of proof: executed, emulated or untested.
    """

    honoured: bool
    text: str
    nearest: str = ""
    composes: bool = False
    evidence: Evidence = "untested"
