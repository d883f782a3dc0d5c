"""Findings of checks, and the table of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes:
        check: name of the check. where: layout, rule or engine.
        outcome: "ok", "FAILED", or "refused" if the capability table refuses the case: then nothing was run, and
            nothing is wrong.
        text: the result in words. evidence: level of proof (``Platform.evidence``), or "table".
    """

    check: str
    where: str
    outcome: Literal["ok", "FAILED", "refused"]
    text: str
    evidence: str


def format_table(findings: Iterable[Finding]) -> str:
    """Format findings as a table, one row each."""
    rows = [("check", "where", "outcome", "evidence", "found")]
    rows += [(f.check, f.where, f.outcome, f.evidence, f.text) for f in findings]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths)), text]) for *cells, text in rows
    )
