"""Supervised training through the same engine and the same batch as RL."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ray.actor import ActorHandle

from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs
from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from rlworker.algorithms.losses import sft_loss
from rlworker.cluster.ray import naming_failures, ray_for
from rlworker.cluster.train_group import SHARD_BYTES, StartingGroup, WorkerGroup
from rlworker.cluster.workers import Role
from rlworker.config.model_checks import check_trained
from rlworker.config.sft import SftConfig
from rlworker.data.examples import read_examples, to_batch
from rlworker.data.images import pictures_of
from rlworker.data.rows import load_tokenizer, rows_of_step
from rlworker.tracking.log import SUPERVISED_LINE, StepClock, tell_start
from rlworker.tracking.run_folder import RunFolder, Score
from rlworker.trainers import step_metrics
from rlworker.trainers.rejected_step import refuse_step
from rlworker.trainers.run import Run
from rlworker.trainers.stop import Stop, ending_well


def launch_supervised(config: SftConfig) -> dict[str, float]:
    """Check everything, start the engine and train to the last step; what ``launch`` is to RL."""
    with ending_well() as stop:
        try:
            config.check_model()
            folder = RunFolder(config.run_dir)
            folder.claim(config)  # before rows are read, whose pictures may be written into it
            trainer = SftTrainer(config, folder, stop)
        except ValueError as error:
            sys.exit(f"error: {error}")
        return trainer.fit()


class SftTrainer(Run):
    """A run of supervised training.

    Args:
        folder, stop: as ``Run``.

    Raises:
        ValueError: the settings, the model, the rows or the run folder cannot be used; nothing was started.
    """

    line = SUPERVISED_LINE
    score = Score("heldout_loss", -1)

    def __init__(self, config: SftConfig, folder: RunFolder | None = None, stop: Stop | None = None):
        super().__init__(config, folder, stop)
        self.model = config.check_model()
        self.tokenizer = load_tokenizer(config.model)
        pictures = pictures_of(self.model, config.run_dir, config.actor.image_memory_mb)
        read = partial(read_examples, tokenizer=self.tokenizer, config=config, model=self.model, pictures=pictures)
        self.train, skipped = read(config.data.train)
        self.heldout, skipped_heldout = read(config.data.heldout) if config.data.heldout else ([], 0)
        self.skipped = {"skipped_train": skipped, "skipped_heldout": skipped_heldout}
        tell_start(f"rows are read: {len(self.train)} to train on, {len(self.heldout)} held out")

    def fit(self) -> dict[str, float]:
        """Claim the run folder, start the engine and run to the last step, or to the end of the one in which the
        program is asked to stop.

        Returns:
            the metrics of the last step.
        """
        config = self.config
        with self.running:
            self.folder.claim(config)
            self.running.callback(self.folder.release)
            engine = training_group(self.model, config.actor_of_run, config.platform, config.seed)
            self.group, self._workers = self.running.enter_context(engine)
            tell_start(f"trainer ranks are up: {len(self.group.actors)}")
            self.begin()
            return super().fit()

    def step(self) -> tuple[dict[str, float], list[dict]]:
        """One optimizer step: its metrics; nothing is sampled."""
        clock, config = StepClock(), self.config
        rows = rows_of_step(self.train, config.rows_per_step, self.steps_done, config.seed)
        batch = to_batch(rows, self.model.vision)
        with self._phase(clock, "update"):
            metrics, outputs = supervised_step(self.group, batch)
        if math.isnan(metrics["grad_norm"]):  # the engine did not step
            refuse_step(self.folder.path, self.steps_done + 1, self.group.name, batch, outputs, self.tokenizer)
        self.steps_done += 1
        times = clock.total()
        return metrics | {"tokens_per_second": batch.num_tokens / times["time_step"]} | times, []

    def evaluate(self) -> dict[str, float]:
        """Mean loss of the held-out rows in nats per token; empty without such rows."""
        if not self.heldout:
            return {}
        clock, each, total, tokens = StepClock(), self.config.rows_per_step, 0.0, 0
        with self._phase(clock, "evaluate"):
            for start in range(0, len(self.heldout), each):  # a few at a time: all of them need not fit into memory
                batch = to_batch(self.heldout[start : start + each], self.model.vision)
                total += float(self.group.forward(batch).logprobs[batch.mask].sum())
                tokens += int(batch.mask.sum())
        return {"heldout_loss": -total / tokens} | clock.seconds

    def learning(self) -> list[WorkerGroup]:
        return [self.group]

    def workers(self) -> dict[str, ActorHandle]:
        return self._workers


# -- parts


@contextmanager
def training_group(
    model: ModelSpec, config: MegatronConfig, platform: str, seed: int
) -> Iterator[tuple[WorkerGroup, dict]]:
    """One engine in processes of its own, which end with this, and each of them by its name."""
    roles = (Role("actor", model, config),)
    with ray_for(config.ranks, platform), StartingGroup("actor", platform, roles, seed) as starting:
        with naming_failures("phase start_trainers", starting.workers()):
            group = starting.ready()["actor"]
        yield group, starting.workers()


def supervised_step(group: WorkerGroup, batch: TrainBatch) -> tuple[dict[str, float], Outputs]:
    """One optimizer step on the mean loss of the targets that count: its metrics, and the outputs from before it."""
    tokens = float(batch.mask.sum())
    results, outputs = group.train_step(batch, sft_loss, tokens)
    metrics = step_metrics.of_update(results, tokens)
    return {"train_loss": metrics.pop("loss")} | metrics, outputs


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
    with training_group(model, config, platform, seed) as (group, _):
        for batch in batches:
            losses.append(supervised_step(group, batch)[0]["train_loss"])
            if len(losses) >= 10 and sum(losses[-10:]) / 10 < stop_below:
                break
        group.call("save_hf", output, SHARD_BYTES)
    return losses
