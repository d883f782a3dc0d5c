"""Toys of several turns: a teacher answers some episodes well, and the model is warmed up on them until it wins now
and then."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Lt

from engines.images import make_columns
from engines.models.vision.vision_spec import VisionSpec
from recipes.common.toys import ToyConfig
from rlworker import TrainBatch, Trainer
from rlworker.algorithms.losses import sft_loss
from rlworker.cluster.train_group import SHARD_BYTES
from rlworker.cluster.workers import TrainWorker
from rlworker.data.encoding import encode_after
from rlworker.data.rows import Row
from rlworker.environments import Environment, Episode, Policy, Sample
from rlworker.environments.codec import Codec, Stops, using_codec
from rlworker.environments.policy import Endpoint, EpisodeLimits
from rlworker.environments.record import CONTEXT, ToolCall, Verdict

Say = Callable[[Row, int], str]
"""``say(row, turn)``: what a model that knows the answer says in a turn, from 0."""
_CHECKED_ROWS = 192
"""Rows whose episodes are sampled greedily after each step of a warm-up."""


@dataclass(frozen=True)
class EpisodeToyConfig(ToyConfig):
    """Settings of a toy of several turns: it is warmed up on worked episodes."""

    warm_up_success: Annotated[float, Gt(0), Lt(1)] = 0.3
    """The warm-up ends when the model wins this share of greedy episodes: enough that rewards within a group differ."""


class Teacher:
    """A policy that says what it was told to; tool calls are written as Hermes has them."""

    limits = EpisodeLimits(turns=100, tokens=10**6, sample_tokens=10**6, time_limit_s=60.0, tool_limit_s=60.0)

    def __init__(self, say: Say, codec: Codec):
        self.say, self.codec = say, codec

    async def sample(self, policy: Policy, episode: Episode, max_tokens: int, stop: Stops) -> Sample:
        text = self.say(episode.row, episode.turns)
        ids = [*encode_after(self.codec.tokenizer, episode.token_ids[-1], text), self.codec.stop_token_ids[0]]
        calls = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text)]
        tool_calls = tuple(ToolCall(call["name"], call["arguments"]) for call in calls)
        content = text.partition("<tool_call>")[0] if calls else ""
        sample = Sample(text, np.asarray(ids, np.int32), True, tool_calls, content=content)
        sample = sample.number_calls(episode.turns)
        episode.add_sample(sample.token_ids, sample.calls, sample.content)
        return sample

    async def call_tool(
        self, policy: Policy, call: Callable, args: tuple, keywords: Mapping[str, Any], limit_s: float, memory_mb: int
    ) -> Any:
        return call(*args, **keywords)

    def open_endpoint(self, policy: Policy, row: Row, tool_parser: str, host: str) -> Endpoint:
        raise ValueError("worked episodes: a teacher has no endpoint; let the environment await policy.sample")

    async def ask_model(self, policy: Policy, model: str, content: Any) -> Verdict:
        return Verdict(error="worked episodes ask no model")


def work_episodes(environment: Environment, say: Say, rows: Sequence[Row], codec: Codec) -> list[Episode]:
    """Run an episode of each row with the teacher as its policy."""

    async def run_all() -> list[Episode]:
        teacher = Teacher(say, codec)
        return [await environment(Policy(teacher, number, (number,)), row) for number, row in enumerate(rows)]

    with using_codec(codec):
        return asyncio.run(run_all())


def batch_worked_episodes(episodes: Sequence[Episode], vision: VisionSpec | None) -> TrainBatch:
    """Batch worked episodes; what the teacher said are the tokens that count."""
    sequences = [segments for episode in episodes for segments in episode.sequences]
    ids = [np.concatenate([np.asarray(segment.token_ids) for segment in segments]) for segments in sequences]
    said = [
        np.concatenate([np.full(len(segment.token_ids), segment.turn != CONTEXT) for segment in segments])
        for segments in sequences
    ]
    images = [tuple(image for segment in segments for image in segment.images) for segments in sequences]
    columns = make_columns([each.tolist() for each in ids], images, vision)
    return TrainBatch.from_ids(ids, sampled=said, **columns)


def warm_up_on_worked_episodes(
    environment: Environment, say: Say, optimizer: dict, rows: int = 128
) -> Callable[[EpisodeToyConfig, str], None]:
    """Make a toy's warm-up on worked episodes, which ends once the model itself wins often enough.

    A loss would not tell when: between never and nearly always lie as few as five steps, at another loss for each seed.
    So every step is followed by a check.

    Args:
        optimizer: settings of it that differ from the run's. rows: episodes of each step.
    """

    def warm_up(config: EpisodeToyConfig, output: str) -> None:
        generator, losses, won = np.random.default_rng([config.seed, 1]), [], 0.0
        actor = replace(config.actor, optimizer=replace(config.actor.optimizer, **optimizer))
        with (
            TemporaryDirectory() as scratch,
            Trainer(replace(config, run_dir=scratch, actor=actor), environment) as trainer,
        ):
            while len(losses) < config.warm_up_steps and won < config.warm_up_success:
                drawn = [trainer.rows[i] for i in generator.integers(0, len(trainer.rows), rows)]
                worked = work_episodes(environment, say, drawn, trainer.codec)
                batch = batch_worked_episodes(worked, trainer.models["actor"].vision)
                metrics, _ = trainer.actor.train_step(batch, sft_loss, float(batch.mask.sum()))
                losses.append(metrics["loss"])
                trainer.sync_weights()
                values = trainer.manager.score_greedy(trainer.rows[:_CHECKED_ROWS]).values
                won = sum(values) / len(values)
            trainer.actor.call(TrainWorker.save_hf, output, SHARD_BYTES)
        print(f"warm-up: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}, {won:.2f} of episodes won")

    return warm_up
