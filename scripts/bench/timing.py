"""Benchmarks share this: how time is taken, the options that all of them have, and their figures as a file."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hardware.platforms import DEFAULT_PLATFORM

_WARM_UP = 2
"""First rounds, which do not count."""


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark's options: ``--tiny`` and ``--json``; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs, in seconds")
    parser.add_argument("--json", type=_parse_new_file, metavar="FILE", help="write the figures here too")
    return parser


def _parse_new_file(text: str) -> Path:
    """Check that a file can be written once the benchmark is done, which may be an hour from now.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or its folder does not exist.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a file: name one in a folder that exists")
    return path


def write_figures(path: Path | None, rows: list[dict[str, str | int | float]]) -> None:
    """Write the figures of a table, headed by where they come from; nothing where no file is named.

    Args:
        rows: of the table, each column's title -> value; titles name units, such as "ours ms".
    """
    if path:
        from rlworker.tracking.provenance import collect_provenance

        path.write_text(
            json.dumps({"head": asdict(collect_provenance(DEFAULT_PLATFORM)), "rows": rows}, indent=1) + "\n"
        )


def measure_ms(*calls: Callable[[], object], rounds: int) -> list[float]:
    """Return the median milliseconds of each call, run in turn so that all of them see the same machine."""
    times = [[] for _ in calls]
    for _ in range(rounds + _WARM_UP):
        for call, milliseconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            milliseconds.append(1000 * (time.perf_counter() - start))
    return [statistics.median(milliseconds[_WARM_UP:]) for milliseconds in times]
