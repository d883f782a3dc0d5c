"""``--capsule-steps``: keep a step of a run as a capsule. Nothing more is imported where no step is kept."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rlworker.base.terminal import LOGGER
from rlworker.cluster.train_group import WorkerGroup
from rlworker.config.run import TrainingConfig
from rlworker.tracking.run_folder import RunFolder


class KeptRun(Protocol):
    """A run whose steps can be kept."""

    steps_done: int

    @property
    def config(self) -> TrainingConfig: ...

    @property
    def folder(self) -> RunFolder: ...

    def list_learners(self) -> list[WorkerGroup]: ...

    def save(self, metrics: Mapping[str, float]) -> None: ...


@contextmanager
def keeping_capsule(run: KeptRun, metrics: Mapping[str, float]) -> Iterator[None]:
    """Keep the step that a run takes in this context as a capsule, if ``--capsule-steps`` names it.

    The optimizer steps of the actor are kept, and the checkpoint before them is written.

    Args:
        metrics: metrics of the last step, for the checkpoint.
    """
    config, before = run.config, run.steps_done
    if before + 1 not in config.capsuled_steps:
        yield
        return
    from rlworker.tracking.capsule import write

    if before:
        run.save(metrics)
    group, folder = run.list_learners()[0], run.folder.path / write.CAPSULES / f"step_{before + 1}"
    with write.recording(group, group.role.config.dtype) as made:
        yield
    if not made.updates:  # nothing was learned
        return
    try:
        write.write_step(made, group, config, before, folder)
    except ValueError as error:
        LOGGER.warning(f"{error}; step {before + 1} is not kept")
