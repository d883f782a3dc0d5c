"""The terminal output of a run: Python's logger ``rlworker``, above the progress bar.

Silence it with ``logging.getLogger("rlworker").setLevel("ERROR")``. If a program gives this logger a handler before it
imports rlworker, the lines go to that handler and not to the terminal.
"""

import logging
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

LOGGER = logging.getLogger("rlworker")


class _TqdmHandler(logging.Handler):
    """Print each line at once, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        tqdm.write(f"{record.levelname} {text}" if record.levelno >= logging.WARNING else text)
        sys.stdout.flush()


if not LOGGER.handlers:
    LOGGER.addHandler(_TqdmHandler())
    LOGGER.propagate = False  # a handler of the root logger would print every line a second time
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)


def log_start(text: str) -> None:
    """Log that a part of the start is done, with the seconds since the program began."""
    LOGGER.info("start %7.1f s  %s", read_process_age(), text)


def read_process_age() -> float:
    """Return the age of this process in seconds.

    psutil's answer is up to a second too long: it adds the time of boot, of which the kernel tells whole seconds.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5), field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
