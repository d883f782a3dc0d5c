"""Supervised training through the same engine and the same batch as RL."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ray.actor import ActorHandle

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.batch.shard import Outputs
from engines.config import MegatronConfig
from engines.images.columns import image_columns
from engines.models.spec import ModelSpec
from engines.models.vision_spec import VisionSpec
from rlworker import step_metrics
from rlworker.checkpoint import RunFolder, Score
from rlworker.cluster import naming_failures, ray_for
from rlworker.data import check_vocabulary, load_tokenizer, read_rows, rows_of_step
from rlworker.group import SHARD_BYTES, StartingGroup, WorkerGroup
from rlworker.losses import sft_loss
from rlworker.metrics import SUPERVISED_LINE, StepClock, tell_start
from rlworker.model_checks import check_trained
from rlworker.pictures import MARKER, Pictures, pictures_of
from rlworker.refused import refuse_step
from rlworker.run import Run
from rlworker.sft_config import SftConfig
from rlworker.stop import Stop, ending_well
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
