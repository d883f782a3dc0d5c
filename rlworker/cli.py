"""The ``rlworker`` command."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Report:
    """Draw a run folder into report.html."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""


def main() -> None:
    """Entry point."""
    command = tyro.cli(Annotated[Report, tyro.conf.subcommand("report")])
    try:
        from rlworker.report import write_report

        print(write_report(command.run))
    except ValueError as error:
        sys.exit(f"error: {error}")
