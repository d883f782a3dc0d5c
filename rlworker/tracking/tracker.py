"""A tracker of experiments, and the run that it is opened for."""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """The interface of a tracker; every ``accelerate.tracking.GeneralTracker`` is one."""

    def start(self) -> None:
        """Open the tracker. Called once, before the other methods."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the metrics of step ``step``."""

    def finish(self) -> None:
        """Close the tracker. Called once, after the other methods."""


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for a tracker.

    Attributes:
        folder: the run's. first_step: steps done so far. config: the run's settings, as ``dataclasses.asdict`` gives
            them.
    """

    folder: Path
    first_step: int
    config: dict

    def keep_id(self, tracker: str) -> str:
        """Return the tracker's id of this run; it is stored, so that a resumed run continues it."""
        file = self.folder / tracker / "run_id"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:8])
        return file.read_text()
