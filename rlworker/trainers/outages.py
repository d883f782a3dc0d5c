"""Outages: the workers that a run lost and replaced, and the limit of their number."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER
from rlworker.cluster.watch import WorkerFailure, describe_lost
from rlworker.tracking.run_folder import OUTAGES

ADVICE = ". What was saved is whole: go on from it with --resume"
"""End of a failure's message, once the run has begun and can be resumed."""

Result = TypeVar("Result")


class Outages:
    """The outages of a run since its program started; the terminal and the run folder report each one.

    Args:
        limit: most outages that are repaired; 0 repairs none.
        folder: the run folder.

    Attributes:
        where: the step and phase that the run is in, for messages.
    """

    def __init__(self, limit: int, folder: Path):
        self.limit, self.path = limit, folder / OUTAGES
        self.told: list[str] = []
        self.where = ""
        self._being_replaced = frozenset[str]()

    def repeat(self, run: Callable[[], Result], go_back: Callable[[], None]) -> Result:
        """Call ``run`` until it returns, and return its result. Where workers are lost, call ``go_back`` and then
        ``run`` again.

        Raises:
            WorkerFailure: workers were lost and none may be replaced, or a worker raised an error.
            RunError: there were more outages than ``limit``.
        """
        is_whole = True
        while True:
            try:
                if not is_whole:
                    go_back()
                is_whole, self._being_replaced = True, frozenset()
                return run()
            except WorkerFailure as failure:
                if not (failure.lost and self.limit):
                    raise
                self.note(failure.where, failure.lost)
                is_whole, self._being_replaced = False, frozenset(failure.lost)

    def note_lost(self, lost: Mapping[str, str]) -> None:
        """Count one outage of workers that are replaced without going back to a checkpoint.

        Nothing is counted if all of them are being replaced since an earlier outage.

        Args:
            lost: name of a lost worker -> how it was lost.
        """
        if lost.keys() - self._being_replaced:
            self.note(self.where, lost)

    def note(self, where: str, lost: Mapping[str, str]) -> None:
        """Count one outage, which is repaired now.

        Args:
            where: step and phase.
            lost: name of a lost worker -> how it was lost.

        Raises:
            RunError: ``limit`` is reached; the message lists all outages.
        """
        text = f"{where}: {describe_lost(lost)}"
        if len(self.told) == self.limit:
            before = "; ".join(f"({number}) {each}" for number, each in enumerate(self.told, 1))
            raise RunError(
                f"{text}. It would be restart {self.limit + 1} of at most {self.limit}, after {before}. Find out what "
                f"ends the workers, or raise --recovery.restarts{ADVICE}"
            )
        self.told.append(text)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"where": where, "lost": dict(lost)}) + "\n")
        LOGGER.warning(f"outage {len(self.told)} of at most {self.limit}: {text}; replaced now")

    def count(self) -> dict[str, int]:
        """Return the number of outages so far as the metric ``restarts``; empty without an outage."""
        return {"restarts": len(self.told)} if self.told else {}
