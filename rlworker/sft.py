"""Supervised training through the same engine and the same batch as RL."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from engines.batch import TrainBatch
from engines.config import MegatronConfig
from engines.images import Image, image_columns
from engines.interfaces import Outputs
from engines.models import ModelSpec
from engines.vision_spec import VisionSpec
from rlworker import step_metrics
from rlworker.checkpoint import RunFolder
from rlworker.cluster import naming_failures, ray_for
from rlworker.data import check_vocabulary, load_tokenizer, read_rows, rows_of_step
from rlworker.errors import RunError
from rlworker.group import SHARD_BYTES, StartingGroup, WorkerGroup, save_groups
from rlworker.losses import sft_loss
from rlworker.metrics import SUPERVISED_LINE, RunLog, StepClock, is_due, note_skipped, tell_start
from rlworker.model_checks import check_trained, start_notes
from rlworker.pictures import MARKER, Pictures, pictures_of
from rlworker.refused import refuse_step
from rlworker.report import write_report
from rlworker.sft_config import SftConfig
from rlworker.trackers import Trackers, check_trackers
from rlworker.worker import Role


@dataclass(frozen=True)
class Example:
    """Prompt and answer in tokens, the end-of-sequence token last; ``prompt_length`` of them are the prompt, which has
    ``images``."""

    ids: tuple[int, ...]
    prompt_length: int
    images: tuple[Image, ...] = ()


def launch_supervised(config: SftConfig) -> dict[str, float]:
    """Check everything, start the engine and train to the last step; what ``launch`` is to RL."""
    try:
        trainer = SftTrainer(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        return trainer.fit()
    except RunError as error:
        sys.exit(f"error: {error}")


class SftTrainer:
    """A run of supervised training.

    Raises:
        ValueError: the settings, the model, the rows or the run folder cannot be used; nothing was started.
    """

    def __init__(self, config: SftConfig):
        self.config = config
        self.model = config.check_model()
        self.folder = RunFolder(config.run_dir)
        self.folder.check(config)
        check_trackers(config.trackers)
        self.tokenizer = load_tokenizer(config.model)
        pictures = pictures_of(self.model, config.run_dir, config.actor.image_memory_mb)
        read = partial(read_examples, tokenizer=self.tokenizer, config=config, model=self.model, pictures=pictures)
        self.train, skipped = read(config.data.train)
        self.heldout, skipped_heldout = read(config.data.heldout) if config.data.heldout else ([], 0)
        self.skipped = {"skipped_train": skipped, "skipped_heldout": skipped_heldout}
        tell_start(f"rows are read: {len(self.train)} to train on, {len(self.heldout)} held out")
        self.steps_done = 0

    def fit(self) -> dict[str, float]:
        """Start the engine and run to the last step, evaluating and saving on the way.

        Returns:
            the metrics of the last step.
        """
        config = self.config
        with training_group(self.model, config.actor_of_run, config.platform, config.seed) as (group, self.workers):
            self.group = group
            tell_start(f"trainer ranks are up: {len(group.actors)}")
            state = self.folder.claim(config)
            if state:
                self.steps_done = state["step"]
                with self._phase(StepClock(), "restore", self.steps_done):
                    group.call("load", f"{state['folder']}/{group.name}")
                tell_start(f"step {self.steps_done} is restored")
            trackers = Trackers(config.trackers, self.folder.path, self.steps_done, asdict(config))
            path = self.folder.path
            with RunLog(path, config.steps, self.steps_done, trackers, SUPERVISED_LINE) as log:
                for note in start_notes(config.platform, config.actor):
                    log.note(note)
                note_skipped(log, self.skipped)
                try:
                    return self._run(log)
                finally:  # a run that stops has a report too
                    log.note(f"report: {write_report(path)}")

    def _run(self, log: RunLog) -> dict[str, float]:
        config, metrics = self.config, {}
        if self.steps_done == 0:
            log.step(0, self.evaluate() | self.skipped)
        while self.steps_done < config.steps:
            metrics = self.step()
            last = self.steps_done == config.steps
            if last or is_due(self.steps_done, config.eval_every):
                metrics |= self.evaluate()
            log.step(self.steps_done, metrics)
            if last or is_due(self.steps_done, config.save_every):
                self.save()
        return metrics

    def step(self) -> dict[str, float]:
        """One optimizer step: its metrics."""
        clock, config = StepClock(), self.config
        rows = rows_of_step(self.train, config.rows_per_step, self.steps_done, config.seed)
        batch = to_batch(rows, self.model.vision)
        with self._phase(clock, "update", self.steps_done + 1):
            metrics, outputs = supervised_step(self.group, batch)
        if math.isnan(metrics["grad_norm"]):  # the engine did not step
            refuse_step(self.folder.path, self.steps_done + 1, self.group.name, batch, outputs, self.tokenizer)
        self.steps_done += 1
        times = clock.total()
        return metrics | {"tokens_per_second": batch.num_tokens / times["time_step"]} | times

    def evaluate(self) -> dict[str, float]:
        """Mean loss of the held-out rows in nats per token; empty without such rows."""
        if not self.heldout:
            return {}
        clock, each, total, tokens = StepClock(), self.config.rows_per_step, 0.0, 0
        with self._phase(clock, "evaluate", self.steps_done):
            for start in range(0, len(self.heldout), each):  # a few at a time: all of them need not fit into memory
                batch = to_batch(self.heldout[start : start + each], self.model.vision)
                total += float(self.group.forward(batch).logprobs[batch.mask].sum())
                tokens += int(batch.mask.sum())
        return {"heldout_loss": -total / tokens} | clock.seconds

    def save(self) -> None:
        """Write a checkpoint: the trainer's state and the model as a HuggingFace folder (``hf``)."""
        with self._phase(StepClock(), "save", self.steps_done):
            partial = self.folder.begin_checkpoint(self.steps_done)
            save_groups([self.group], partial)
            self.folder.finish_checkpoint(partial, {"step": self.steps_done})

    @contextmanager
    def _phase(self, clock: StepClock, name: str, step: int) -> Iterator[None]:
        advice = ". What was saved is whole: go on from it with --resume"
        with clock.phase(name), naming_failures(f"step {step}, phase {name}", self.workers, advice):
            yield


# -- parts


@contextmanager
def training_group(
    model: ModelSpec, config: MegatronConfig, platform: str, seed: int
) -> Iterator[tuple[WorkerGroup, dict]]:
    """One engine in processes of its own, which end with this, and each of them by its name."""
    with ray_for(config.ranks, platform):
        starting = StartingGroup("actor", platform, (Role("actor", model, config),), seed)
        try:
            with naming_failures("phase start_trainers", starting.workers()):
                group = starting.ready()["actor"]
            yield group, starting.workers()
        finally:
            starting.stop()


def supervised_step(group: WorkerGroup, batch: TrainBatch) -> tuple[dict[str, float], Outputs]:
    """One optimizer step on the mean loss of the targets that count: its metrics, and the outputs from before it."""
    tokens = float(batch.mask.sum())
    results, outputs = group.train_step(batch, sft_loss, tokens)
    metrics = step_metrics.of_update(results, tokens)
    return {"train_loss": metrics.pop("loss")} | metrics, outputs


def read_examples(
    path: str, tokenizer, config: SftConfig, model: ModelSpec, pictures: Pictures | None = None
) -> tuple[list[Example], int]:
    """The rows at ``path`` as examples, and how many were skipped because they are too long.

    Raises:
        ValueError: as ``read_rows``; an answer is too long or has the token of a picture, or a token is not in the
            model's vocabulary.
    """
    read = read_rows(path, tokenizer, config.data, pictures)
    answers = tokenizer([row.answer for row in read.rows], add_special_tokens=False)["input_ids"]
    texts, examples, most = [], [], config.max_answer_tokens
    for row, answer in zip(read.rows, answers, strict=True):
        if MARKER in row.answer and pictures:
            raise ValueError(f"data: {path}: the answer {row.answer[:80]!r} has {MARKER}: only prompts have pictures")
        if banned := set(answer) & set(model.banned_tokens):
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has tokens {sorted(banned)}, which stand for pictures; "
                "leave them out"
            )
        if len(answer) < most:
            texts.append(row.prompt)
            ids = (*row.prompt_ids, *answer, tokenizer.eos_token_id)
            examples.append(Example(ids, len(row.prompt_ids), row.images))
        elif not config.data.skip_long_prompts:
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has {len(answer)} tokens and an end, expected at most "
                f"{most}; raise --max-answer-tokens or leave long ones out with --data.skip-long-prompts"
            )
    if not examples:
        raise ValueError(f"data: {path}: all answers are longer than {most} tokens; raise --max-answer-tokens")
    check_vocabulary(texts, [example.ids for example in examples], tokenizer, model.vocab)
    return examples, read.skipped + len(read.rows) - len(examples)


def to_batch(examples: list[Example], vision: VisionSpec | None = None) -> TrainBatch:
    """The examples' tokens; the answers' are those that count."""
    ids = [example.ids for example in examples]
    columns = image_columns(ids, [example.images for example in examples], vision) if vision else {}
    return TrainBatch.from_ids(ids, [example.prompt_length for example in examples], **columns)


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
