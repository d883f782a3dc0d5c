"""Supervised training through the same engine and the same batch as RL."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from engines.batch.batch import TrainBatch
from engines.batch.shard import get_logprobs
from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from rlworker.algorithms.losses import sft_loss
from rlworker.base.terminal import log_start
from rlworker.cluster.ray import running_ray
from rlworker.cluster.train_group import SHARD_BYTES, StartingGroup, WorkerGroup
from rlworker.cluster.watch import naming_failures
from rlworker.cluster.workers import Role, TrainWorker
from rlworker.config.model_checks import check_trainable
from rlworker.config.sft import SftConfig
from rlworker.config.validation import name_set
from rlworker.data import make_image_reader
from rlworker.data.examples import Example, read_examples, to_batch
from rlworker.data.rows import load_tokenizer, pick_rows
from rlworker.tracking.log import SUPERVISED_LINE, StepClock
from rlworker.tracking.run_folder import RunFolder, Score
from rlworker.tracking.tracker import Tracker
from rlworker.trainers import step_metrics
from rlworker.trainers.run import Run
from rlworker.trainers.stop import Stop


class SftTrainer(Run[SftConfig]):
    """A run of supervised training. ``Run`` says how to use it.

    Args:
        config: settings of the run.
        folder, stop, trackers: as for ``Run``.

    Raises:
        ValueError: the settings, the model, the rows or the run folder cannot be used; nothing was started.
    """

    line = SUPERVISED_LINE
    rows_done = 0
    """Number of rows that all optimizer steps took; ``rows_per_step`` may have changed between them."""

    def __init__(
        self,
        config: SftConfig,
        *,
        folder: RunFolder | None = None,
        stop: Stop | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        super().__init__(config, folder, stop, trackers)
        self.score = Score(config.choose_metric(), -1)
        self.model = config.check_models(self.folder.inputs.find_model)["actor"]
        self.tokenizer = load_tokenizer(self.model.folder, config.data.chat_template_args)
        image_reader = make_image_reader(self.model, config.run_dir, config.actor.image_memory_mb)
        sets = config.data.heldouts
        read = partial(
            read_examples, tokenizer=self.tokenizer, config=config, model=self.model, image_reader=image_reader
        )
        self.train, skipped = read(config.data.train)
        heldout = {name: read(path) for name, path in sets.items()}
        self.heldout = {name: examples for name, (examples, _) in heldout.items()}
        held_out = [example for examples in self.heldout.values() for example in examples]
        every, adapters = [*self.train, *held_out], config.actor.lora.start
        self.folder.inputs.hold(config.data, {"actor": self.model}, every, adapters=adapters)
        self.skipped = {"skipped_train": skipped, "skipped_heldout": sum(count for _, count in heldout.values())}
        log_start(f"rows are read: {len(self.train)} to train on, {len(held_out)} held out")

    def start_engines(self, clock: StepClock) -> None:
        """Start the one engine."""
        config = self.config
        roles = (Role("actor", self.model, config.actor_of_run),)
        self.start_processes(StartingGroup("actor", config.platform, roles, config.seed))
        with self._phase(clock, "start_trainers"):
            self.wait_for_trainers()
        log_start(f"trainer ranks are up: {len(self.group.workers)}")

    def take_groups(self, groups: dict[str, WorkerGroup]) -> None:
        self.group = groups["actor"]

    def step(self) -> tuple[dict[str, float], list[dict]]:
        """Take one optimizer step, and return its metrics and an empty list, since nothing is sampled."""
        clock, config = StepClock(), self.config
        rows = pick_rows(self.train, config.rows_per_step, self.rows_done, config.seed)
        self.rows_done += len(rows)
        batch = to_batch(rows, self.model.vision)
        with self._phase(clock, "update"):
            metrics, outputs = self.group.train_step(batch, sft_loss, float(batch.mask.sum()))
            metrics |= step_metrics.measure_memory(self.processes)
        metrics |= step_metrics.measure_flops({"actor": self.model}, batch, metrics | clock.seconds, config.actor)
        if math.isnan(metrics["grad_norm"]):
            self.reject_step("actor", batch, outputs)
        self.steps_done += 1
        times = clock.total()
        metrics = {"train_loss": metrics.pop("loss")} | metrics
        return metrics | {"tokens_per_second": batch.num_tokens / times["time_step"]} | times, []

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of each held-out set, in nats per token; empty without held-out rows."""
        if not self.heldout:
            return {}
        clock = StepClock()
        with self._phase(clock, "evaluate"):
            losses = {f"{name_set(name)}_loss": self._measure_loss(rows) for name, rows in self.heldout.items()}
        return losses | clock.seconds

    def _measure_loss(self, rows: list[Example]) -> float:
        each, total, tokens = self.config.rows_per_step, 0.0, 0
        for start in range(0, len(rows), each):  # a few at a time: all of them need not fit into memory
            batch = to_batch(rows[start : start + each], self.model.vision)
            total += float(get_logprobs(self.group.forward(batch))[batch.mask].sum())
            tokens += int(batch.mask.sum())
        return -total / tokens

    def get_state(self) -> dict[str, int]:
        return {"rows": self.rows_done}

    def restore(self, state: dict) -> None:
        self.rows_done = state.get("rows", state["step"] * self.config.rows_per_step)
        super().restore(state)

    def list_learners(self) -> list[WorkerGroup]:
        return [self.group]


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
    """Take one optimizer step per batch, then save the model as a HuggingFace folder at ``output``.

    Args:
        model, config: the model, and settings of its engine.
        platform: name of the platform. seed: seed of the weights that are drawn at random.
        stop_below: mean loss of the last ten steps below which training ends early.

    Returns:
        the mean loss of each step, in nats per counting token.

    Raises:
        ValueError: ``output`` exists, or the model does not fit the parallel sizes.
    """
    if Path(output).exists():
        raise ValueError(f"sft: output folder {output!r} exists already; choose another or move it away")
    check_trainable(model, config, platform)
    losses = []
    roles = (Role("actor", model, config),)
    with running_ray(config.ranks, platform), StartingGroup("actor", platform, roles, seed) as starting:
        with naming_failures("phase start_trainers", starting.name_workers):
            group = starting.wait()["actor"]
        for step, batch in enumerate(batches, 1):
            with naming_failures(f"sft: step {step}", starting.name_workers):
                metrics, _ = group.train_step(batch, sft_loss, float(batch.mask.sum()))
            losses.append(metrics["loss"])
            if len(losses) >= 10 and sum(losses[-10:]) / 10 < stop_below:
                break
        with naming_failures("sft: save", starting.name_workers):
            group.call(TrainWorker.save_hf, output, SHARD_BYTES)
    return losses
