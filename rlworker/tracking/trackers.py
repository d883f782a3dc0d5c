"""Experiment trackers, which get the metrics in addition to metrics.jsonl. They are imported only if a run names them.

Trackers with a name are in ``named_trackers.py``. A recipe may pass any object that is a ``Tracker``.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rlworker.base.terminal import LOGGER
from rlworker.tracking.tracker import TrackedRun, Tracker

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which launchers tell the number of processes; accelerate would wait for as many."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that trackers are installed, without importing them.

    Raises:
        ValueError: a tracker is not installed.
    """
    for name in names:
        for package in (name, "accelerate"):  # a tracker's name is also that of its package
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # without an origin it is just a folder of that name on the path
                raise ValueError(
                    f"trackers: {package} is not installed; install it (pip install {package}) or leave {name} out of "
                    "--trackers"
                )


class Trackers:
    """The open trackers of a run.

    A tracker cannot end the run: one that fails, even at its start, is dropped with a warning.

    Args:
        names: names of trackers to open.
        run: description of the run for these trackers.
        others: the user's own tracker objects, which are started here.
    """

    def __init__(self, names: Iterable[str], run: TrackedRun, others: Sequence[Tracker] = ()):
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._dropping(name):
                from rlworker.tracking.named_trackers import OPENERS

                self._start(name, OPENERS[name](run))
        for number, tracker in enumerate(others, 1):
            name = f"{type(tracker).__name__} ({number})"
            with self._dropping(name):
                self._start(name, tracker)

    def _start(self, name: str, tracker: Tracker) -> None:
        if "accelerate" in sys.modules:
            from accelerate import PartialState
            from accelerate.utils import patch_environment

            with patch_environment(LOCAL_RANK=-1, **dict.fromkeys(_SIZES, 1)):
                PartialState(cpu=True)  # its trackers ask whether this is the main process; no device is looked for
        tracker.start()
        self._open[name] = tracker

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of step ``step`` in every tracker, with seconds ``time_x`` renamed to ``time/x``."""
        shown = {f"time/{k.removeprefix('time_')}" if k.startswith("time_") else k: v for k, v in metrics.items()}
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.log(shown, step=step)

    def close(self) -> None:
        while self._open:
            name, tracker = self._open.popitem()
            with self._dropping(name):
                tracker.finish()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            LOGGER.warning(f"tracker {name} failed and is dropped, metrics.jsonl goes on: {what}")
            if failed := self._open.pop(name, None):
                with suppress(Exception):
                    failed.finish()
