"""The workers that a run lost and replaced: how many it may, and which they were."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rlworker.cluster.watch import WorkerFailure, describe_lost
from rlworker.errors import RunError
from rlworker.tracking.run_folder import OUTAGES
from rlworker.tracking.terminal import LOGGER

ADVICE = ". What was saved is whole: go on from it with --resume"
"""Ends the message of a failure, once there is a run to go on with."""

Result = TypeVar("Result")


class Outages:
    """The outages of a run since its program started; each is told on the terminal and in the run folder.

    Args:
        limit: outages that are repaired; 0 repairs none. folder: of the run.

    Attributes:
        where: step and phase that the run is at.
    """

    def __init__(self, limit: int, folder: Path):
        self.limit, self.path = limit, folder / OUTAGES
        self.told: list[str] = []
        self.where = ""
        self._being_replaced = frozenset[str]()

    def repeat(self, run: Callable[[], Result], go_back: Callable[[], None]) -> Result:
        """Run to the end. Where workers are lost, start new workers, go back to the newest checkpoint and run on.

        Raises:
            WorkerFailure: workers were lost and none may be replaced, or one raised an error.
            RunError: workers were lost more often than may be.
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
        """Count an outage that is repaired where the run is, unless its workers are being replaced already."""
        if lost.keys() - self._being_replaced:
            self.note(self.where, lost)

    def note(self, where: str, lost: Mapping[str, str]) -> None:
        """Count an outage, which is repaired now.

        Args:
            where: step and phase. lost: names of the lost workers, and the cause for each.

        Raises:
            RunError: there were as many as may be; the message names them all.
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
        """Count the outages so far as the metric ``restarts``; nothing where there was none."""
        return {"restarts": len(self.told)} if self.told else {}
