"""The interface of an experiment tracker, and the description of a run that it is opened with."""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """The interface of an experiment tracker; every ``accelerate.tracking.GeneralTracker`` has it."""

    def start(self) -> None:
        """Open the tracker. A run calls this once, before the other methods."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the metrics of step ``step``: name -> value."""

    def finish(self) -> None:
        """Close the tracker. A run calls this once, after the other methods."""


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for a tracker.

    Attributes:
        folder: the run folder. first_step: number of steps done so far.
        config: the run's settings, as ``dataclasses.asdict`` returns them.
    """

    folder: Path
    first_step: int
    config: dict

    def keep_id(self, tracker: str) -> str:
        """Return the id by which ``tracker`` knows this run; it is stored, so that a resumed run continues it."""
        file = self.folder / tracker / "run_id"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:8])
        return file.read_text()
