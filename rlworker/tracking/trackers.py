"""Experiment trackers, which get metrics beside metrics.jsonl, imported only where a run asks for them.

Those that have a name here are accelerate's (https://huggingface.co/docs/accelerate, ``accelerate.tracking``). A recipe
may pass others of its classes, or any object that is a ``Tracker``.
"""

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from rlworker.config.run import TrackerName
from rlworker.tracking.terminal import LOGGER

_PROJECT = "rlworker"
_FINISH_S = 120.0
"""Seconds that the end of a run waits for what wandb has not sent yet; ``wandb sync`` can send it later."""


class Tracker(Protocol):
    """The interface of a tracker; every ``accelerate.tracking.GeneralTracker`` is one."""

    def start(self) -> None:
        """Open it. Called once, before the others."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the metrics of step ``step``."""

    def finish(self) -> None:
        """Close it. Called once, after the others."""


@dataclass(frozen=True)
class TrackedRun:
    """The facts that a tracker is told of a run.

    Attributes:
        folder: the run's. first_step: steps done so far. config: the run's settings, as ``dataclasses.asdict`` gives
            them.
    """

    folder: Path
    first_step: int
    config: dict

    def keep_id(self, tracker: str) -> str:
        """Return the id by which a tracker knows this run; it is kept, so that a resumed run goes on with it."""
        file = self.folder / tracker / "run_id"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:8])
        return file.read_text()


def check_trackers(names: Iterable[str]) -> None:
    """See whether the trackers are installed, without importing them.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        for package in (name, "accelerate"):  # a tracker's name is also that of its package
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # without an origin it is just a folder of that name on the path
                raise ValueError(
                    f"trackers: {package} is not installed; install it (pip install {package}) or leave {name} out of "
                    "--trackers"
                )


def _open_tensorboard(run: TrackedRun) -> Tracker:
    """Open a writer of scalars over the step in ``run_dir/tensorboard``."""
    from accelerate.tracking import TensorBoardTracker

    # What stands there of later steps is no longer shown: they are done again. Only a run that starts records step 0.
    return TensorBoardTracker("tensorboard", run.folder, purge_step=run.first_step + 1 if run.first_step else 0)


def _open_wandb(run: TrackedRun) -> Tracker:
    """Open a run in ``run_dir/wandb``; WANDB_MODE (offline unless set), WANDB_PROJECT and WANDB_NAME are heeded."""
    import wandb
    from accelerate.tracking import WandBTracker

    return WandBTracker(
        os.environ.get("WANDB_PROJECT", _PROJECT),
        name=os.environ.get("WANDB_NAME", run.folder.name),
        mode=os.environ.get("WANDB_MODE", "offline"),
        dir=run.folder,
        id=run.keep_id("wandb"),
        resume="allow",
        config=run.config,
        settings=wandb.Settings(quiet=True, finish_timeout=_FINISH_S, finish_timeout_raises=True),
    )


def _open_mlflow(run: TrackedRun) -> Tracker:
    """Open a run in ``run_dir/mlflow``, or where MLFLOW_TRACKING_URI says; other MLFLOW_ variables are heeded too."""
    import mlflow  # pyright: ignore[reportMissingImports]  an extra of its own, in no list of pins
    from accelerate.tracking import MLflowTracker

    id_file = run.folder / "mlflow" / "run_id"
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.folder.absolute()}/mlflow/mlflow.db")

    class Resumed(MLflowTracker):
        def start(self) -> None:  # MLflow gives a run its id
            super().start()
            id_file.write_text(self.tracker.info.run_id)

    id_file.parent.mkdir(exist_ok=True)
    known = id_file.read_text() if id_file.exists() else None
    return Resumed(experiment_name=_PROJECT, run_id=known, run_name=run.folder.name)


def _open_swanlab(run: TrackedRun) -> Tracker:
    """Open a run in ``run_dir/swanlab``, and one more where it is resumed; SWANLAB_MODE (offline unless set) is
    heeded."""
    from accelerate.tracking import SwanLabTracker

    return SwanLabTracker(
        _PROJECT,
        experiment_name=run.folder.name,
        logdir=str(run.folder / "swanlab"),
        mode=os.environ.get("SWANLAB_MODE", "offline"),
        config=run.config,
    )


def _open_trackio(run: TrackedRun) -> Tracker:
    """Open a run in ``run_dir/trackio``, or where TRACKIO_DIR says, resumed by the name of the run folder."""
    os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))  # read as trackio is imported
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(_PROJECT, name=run.folder.name, config=run.config, resume="allow")


_OPENED: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "swanlab": _open_swanlab,
    "trackio": _open_trackio,
}
assert set(_OPENED) == set(get_args(TrackerName))


class Trackers:
    """The open trackers of a run.

    None of them can end it: one that fails, be it at its start, is dropped with a warning.

    Args:
        names: of those to be made here. run: its description for them. others: trackers of the user's own.
    """

    def __init__(self, names: Iterable[str], run: TrackedRun, others: Sequence[Tracker] = ()):
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._dropping(name):
                self._start(name, _OPENED[name](run))
        for number, tracker in enumerate(others, 1):
            name = f"{type(tracker).__name__} ({number})"
            with self._dropping(name):
                self._start(name, tracker)

    def _start(self, name: str, tracker: Tracker) -> None:
        if "accelerate" in sys.modules:
            from accelerate import PartialState

            PartialState(cpu=True)  # its trackers ask whether this is the main process; no device is looked for
        tracker.start()
        self._open[name] = tracker

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of step ``step``; seconds (``time_x``) are shown as a group (``time/x``)."""
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
