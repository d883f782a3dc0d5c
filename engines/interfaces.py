"""What the RL side may ask of an engine, and what it gets back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.batch import Completion, TrainBatch
from engines.images import Prompt


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says about each target of a batch.

    Attributes:
        logprobs: ``[N]`` float32, log-probability of the target at the sampling temperature.
        entropy: ``[N]`` float32, entropy of the distribution that predicts it, in nats.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class ValueOutputs:
    """What a critic says about each input of a batch.

    Attributes:
        values: ``[N]`` float32, the value of the prefix that ends at the input.
    """

    values: Tensor


@dataclass(frozen=True)
class Shard:
    """One replica's part of a batch, in the order in which it is computed.

    Attributes:
        counts: sequences of each micro-batch; they follow one another in ``batch``.
        fillers: micro-batches that come after them, so that every replica has as many. Each is the last sequence of
            ``batch``, which belongs to none of the counts: it is computed and counts for nothing.
        replica: the data-parallel rank that this is for.
        digest: of the whole schedule (``engines.schedule``), the same on every rank.
    """

    batch: TrainBatch
    counts: tuple[int, ...]
    fillers: int
    replica: int
    digest: int

    @property
    def num_tokens(self) -> int:
        """Of the sequences that count."""
        return sum(self.batch.lengths[: sum(self.counts)])

    def micro_batches(self) -> list[TrainBatch]:
        """Views of the batch."""
        bounds = [0, *accumulate(self.counts)]
        real = [self.batch.select(a, b) for a, b in zip(bounds, bounds[1:])]
        return real + [self.batch.select(bounds[-1], len(self.batch))] * self.fillers


Outputs = TokenOutputs | ValueOutputs
"""Of a language model, or of a critic."""


def join_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Outputs of consecutive sequences, end to end."""
    return type(parts[0])(*map(torch.cat, zip(*(vars(part).values() for part in parts))))


LossFn = Callable[[Any, TrainBatch], tuple[Tensor, dict[str, Tensor]]]
"""``loss_fn(outputs, batch) -> (sum, metrics)``: a scalar SUM over the batch's tokens, never a mean, and metric sums.

``outputs`` are of the engine's own kind. The engine divides the sum by the denominator of the whole optimizer step, so
a loss does not depend on how the batch was cut. Metric sums are added over micro-batches and data-parallel ranks; a
name that ends in ``_max`` is a maximum.
"""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, as one data-parallel rank saw it.

    Attributes:
        metrics: metric sums over this rank's shard.
        outputs: of this rank's shard, from the weights before the step; None on ranks that are not the leader.
        grad_norm: global L2 norm of the gradient before clipping; NaN where the gradient was not finite on some rank
            and the step was refused: the weights are as they were. lr: the learning rate that was used.
    """

    metrics: dict[str, float]
    outputs: Outputs | None
    grad_norm: float
    lr: float


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        count: completions per prompt. temperature: 0 is greedy. max_tokens: the length limit.
        stream: numbers that name a stream of random numbers, as many of them for each use; draws repeat for the same
            stream, weights and prompts, and streams of different names have nothing in common.
        stop_token_ids: a completion ends with the first of these, which belongs to it.
    """

    count: int
    temperature: float
    max_tokens: int
    stream: tuple[int, ...]
    stop_token_ids: tuple[int, ...]

    @property
    def seed(self) -> int:
        """64 bits hashed from all of ``stream``: neighbours in one number never meet those in another."""
        return int(np.random.SeedSequence(self.stream).generate_state(1, np.uint64)[0])


class TrainEngine(Protocol):
    """A model that learns, spread over ranks; every rank holds one and every method is collective."""

    dp_rank: int
    dp_size: int
    is_leader: bool
    """This rank holds the outputs of its data-parallel replica."""

    def forward(self, shard: Shard) -> Outputs | None:
        """Outputs of this replica's shard, in its order; None on ranks that are not the leader."""

    def train_step(self, shard: Shard, loss_fn: LossFn, denominator: float) -> StepResult:
        """One optimizer step on ``sum(loss) / denominator``, over the shards of all replicas."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """``(HF name, full tensor)`` of every weight, one at a time; yields on the first replica's leader only."""

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


class RolloutEngine(Protocol):
    """A model that samples."""

    version: int
    """Of its weights; those it started with are 0."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """``[P][count]`` completions."""

    def load_weights(self, bucket: Any, version: int, last: bool) -> None:
        """Take one bucket of new weights; ``last`` makes them count as ``version``."""
