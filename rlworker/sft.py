"""Supervised training through the same engine and the same batch as RL."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from engines.batch import TrainBatch
from engines.config import MegatronConfig
from engines.models import ModelSpec
from rlworker.cluster import ray_for
from rlworker.group import SHARD_BYTES, StartingGroup
from rlworker.losses import sft_loss
from rlworker.model_checks import check_trained
from rlworker.worker import Role


def train_supervised(
    model: ModelSpec,
    config: MegatronConfig,
    batches: Iterable[TrainBatch],
    output: str,
    *,
    platform: str,
    seed: int,
    stop_below: float = 0.0,
) -> list[float]:
    """One optimizer step per batch, then the model is saved as a HuggingFace folder at ``output``.

    Args:
        stop_below: end early once the mean loss of the last ten steps is below this.

    Returns:
        mean loss per counted target of each step, in nats.

    Raises:
        ValueError: ``output`` exists, or the model does not fit the parallel sizes.
    """
    if Path(output).exists():
        raise ValueError(f"sft: output folder {output!r} exists already; choose another or move it away")
    check_trained(model, config, platform)
    losses = []
    with ray_for(config.ranks), ExitStack() as running:
        starting = StartingGroup("actor", platform, (Role("actor", model, config),), seed)
        running.callback(starting.stop)
        group = starting.ready()["actor"]
        for batch in batches:
            tokens = float(batch.mask.sum())
            results = group.call_sharded("train_step", batch, sft_loss, tokens)
            losses.append(sum(result.metrics["loss"] for result in results) / tokens)
            if len(losses) >= 10 and sum(losses[-10:]) / 10 < stop_below:
                break
        group.call("save_hf", output, SHARD_BYTES)
    return losses
