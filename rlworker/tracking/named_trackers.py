"""Open trackers by name, with classes of accelerate (https://huggingface.co/docs/accelerate,
``accelerate.tracking``)."""

import os
from collections.abc import Callable
from typing import get_args

from rlworker.config.run import TrackerName
from rlworker.tracking.tracker import TrackedRun, Tracker

_PROJECT = "rlworker"
_FINISH_S = 120.0
"""Seconds that the end of a run waits for wandb's unsent data; ``wandb sync`` can send it later."""


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
    """Open a run in ``run_dir/mlflow``, or at MLFLOW_TRACKING_URI; other MLFLOW_ variables work too."""
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
    """Open a run in ``run_dir/trackio``, or in TRACKIO_DIR, resumed by the name of the run folder."""
    os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))  # read as trackio is imported
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(_PROJECT, name=run.folder.name, config=run.config, resume="allow")


OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "swanlab": _open_swanlab,
    "trackio": _open_trackio,
}
assert set(OPENERS) == set(get_args(TrackerName))
