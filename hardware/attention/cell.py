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
        honoured: the backend computes the rule when told as ``text`` says; else ``text`` says why it does not.
        nearest: where refused, what comes nearest.
        composes: the rule is told by a mask of any form, so that it may be asked together with others told so.
        evidence: how far this was proven here.
    """

    honoured: bool
    text: str
    nearest: str = ""
    composes: bool = False
    evidence: Evidence = "untested"
