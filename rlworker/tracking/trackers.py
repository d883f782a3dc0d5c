"""Where metrics go beside metrics.jsonl: TensorBoard and Weights & Biases, imported only where a run asks for them."""

import importlib.util
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

_FINISH_S = 120.0
"""How long the end of a run waits for what wandb has not sent yet; ``wandb sync`` can send it later."""


def check_trackers(names: Iterable[str]) -> None:
    """See whether the trackers are installed, without importing them.

    Raises:
        ValueError: one is not.
    """
    for name in names:  # which is also the name of its package
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is just a folder of that name on the path
            raise ValueError(
                f"trackers: {name} is not installed; install it (pip install {name}) or leave it out of --trackers"
            )


class TensorBoardTracker:
    """Scalars over the step in ``run_dir/tensorboard``.

    Args:
        first_step: steps done so far; what stands there of later ones is no longer shown, for they are done again.
    """

    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        next_step = first_step + 1 if first_step else 0  # only a run that starts records step 0
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=next_step)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of wandb in ``run_dir/wandb``, whose id is kept there, so that a resumed run goes on with it.

    It stays on this machine unless WANDB_MODE says otherwise; WANDB_PROJECT and WANDB_NAME are heeded too.
    """

    def __init__(self, folder: Path, config: dict):
        import wandb

        id_file = folder / "wandb" / "run_id"
        id_file.parent.mkdir(exist_ok=True)
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rlworker"),
            name=os.environ.get("WANDB_NAME", folder.name),
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=folder,
            id=id_file.read_text(),
            resume="allow",
            config=config,
            settings=wandb.Settings(quiet=True, finish_timeout=_FINISH_S, finish_timeout_raises=True),
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """The trackers of a run.

    None of them can end it: one that fails, be it at its start, is dropped with a note on the terminal.

    Args:
        names: "tensorboard", "wandb". folder: the run's. first_step: steps done so far.
        config: the run's settings, for wandb.
    """

    def __init__(self, names: Iterable[str], folder: Path, first_step: int, config: dict):
        self._open: dict[str, TensorBoardTracker | WandbTracker] = {}
        for name in dict.fromkeys(names):
            with self._dropping(name):
                is_wandb = name == "wandb"
                self._open[name] = WandbTracker(folder, config) if is_wandb else TensorBoardTracker(folder, first_step)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of step ``step``; seconds (``time_x``) are shown as a group (``time/x``)."""
        shown = {f"time/{k.removeprefix('time_')}" if k.startswith("time_") else k: v for k, v in metrics.items()}
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.step(step, shown)

    def close(self) -> None:
        while self._open:
            name, tracker = self._open.popitem()
            with self._dropping(name):
                tracker.close()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            tqdm.write(f"WARNING tracker {name} failed and is dropped, metrics.jsonl goes on: {what}")
            if failed := self._open.pop(name, None):
                with suppress(Exception):
                    failed.close()
