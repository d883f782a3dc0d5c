"""Write a recorded step of a run as a capsule."""

from dataclasses import asdict
from pathlib import Path

from rlworker.base.terminal import LOGGER
from rlworker.cluster.train_group import WorkerGroup
from rlworker.config.run import TrainingConfig
from rlworker.tracking.capsule.files import CAPSULES, Capsule, write_capsule
from rlworker.tracking.capsule.functions import describe_function
from rlworker.tracking.capsule.record import Recording, recording
from rlworker.tracking.provenance import collect_provenance

__all__ = ["CAPSULES", "recording", "write_step"]


def write_step(recorded: Recording, group: WorkerGroup, config: TrainingConfig, before: int, folder: Path) -> None:
    """Write the step behind ``before`` steps into a folder.

    Args:
        group: the engine whose optimizer steps were recorded.

    Raises:
        ValueError: the loss has no name by which it could be found again.
    """
    capsule = Capsule(
        folder=folder.absolute(),
        step=before + 1,
        platform=config.platform,
        config=group.role.config,
        temperature=group.role.temperature,
        seed=config.seed,
        model=group.role.model.folder,
        checkpoint=f"checkpoints/step_{before}" if before else "",
        weights=recorded.weights,
        loss=describe_function(recorded.losses[0]),
        provenance=asdict(collect_provenance(config.platform)),
        updates=recorded.updates,
    )
    size = write_capsule(capsule)
    LOGGER.info(f"capsule: step {before + 1} is kept in {folder}, {size / 2**20:.1f} MB")
