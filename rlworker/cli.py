"""The ``rlworker`` command."""

import sys
from pathlib import Path

import tyro
from tyro.conf import Positional


def report(run: Positional[Path]) -> None:
    """Draw a run folder into its report.html.

    Args:
        run: Folder of the run.
    """
    from rlworker.report import write_report

    print(write_report(run))


def main() -> None:
    """Entry point."""
    try:
        tyro.extras.subcommand_cli_from_dict({"report": report}, prog="rlworker", description="RL post-training.")
    except ValueError as error:
        sys.exit(f"error: {error}")
