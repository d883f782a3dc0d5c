"""A replica's part of a batch, and the outputs of a model for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from hardware.attention.mask_spec import Sharing


@dataclass(frozen=True)
class Shard:
    """One replica's part of a batch, in the order in which it is computed.

    Attributes:
        batch: the sequences.
        counts: number of sequences of each micro-batch, which follow one another in ``batch``.
        num_dummies: number of dummy micro-batches after them, so that every replica has equally many. Each is the last
            sequence of ``batch``, which is in no other micro-batch: it is computed and counts for nothing.
        replica: data-parallel rank of the replica.
        digest: digest of the whole schedule (``engines.batch.schedule``), the same on every rank.
        sharing: for each micro-batch of ``counts``, the sequences that begin alike; empty if none do.
    """

    batch: TrainBatch
    counts: tuple[int, ...]
    num_dummies: int
    replica: int
    digest: int
    sharing: tuple[Sharing | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the dummies."""
        return sum(self.batch.lengths[: sum(self.counts)])

    def count_computed(self) -> int:
        """Count the tokens that are computed, without the dummies; those that sequences share count once."""
        return self.num_tokens - sum(sum(one.counts) for one in self.sharing if one)

    def micro_batches(self) -> list[TrainBatch]:
        """Return the micro-batches as views of the batch: real ones by ``counts``, then the equal dummies."""
        bounds = [0, *accumulate(self.counts)]  # sequences before each micro-batch; past the last lies the dummy's
        return self.batch.cut(bounds) + [self.batch.select(bounds[-1], len(self.batch))] * self.num_dummies

    def list_sharing(self) -> list[Sharing | None]:
        """Return for each micro-batch, dummies included, the sequences that begin alike."""
        return [*(self.sharing or [None] * len(self.counts)), *[None] * self.num_dummies]

    def find_scored(self) -> list[np.ndarray]:
        """Return for each micro-batch the targets whose scores a loss or a metric reads, ``[N]`` bool.

        They are the targets that count or have a weight. The batch must be in the host's memory.
        """
        batch, bounds = self.batch, np.cumsum([0, *self.counts, 1])
        scored = batch.mask.numpy() if batch.weights is None else (batch.mask | (batch.weights != 0)).numpy()
        parts = np.split(scored, np.cumsum([0, *batch.lengths])[bounds[1:-1]])
        return parts[:-1] + parts[-1:] * self.num_dummies


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a language model for each target of a batch.

    Attributes:
        logprobs: ``[N]`` float32, log-probability of the target at the sampling temperature.
        entropy: ``[N]`` float32, entropy of the distribution that predicts it, in nats.
        top_logprobs: ``[N, k + 1]`` float32, log-probabilities of the batch's ``rollout_top_ids``, 0 for an id of -1,
            and last of all other ids together; None for a batch without top ids.
    """

    logprobs: Tensor
    entropy: Tensor
    top_logprobs: Tensor | None = None


@dataclass(frozen=True)
class ValueOutputs:
    """Outputs of a critic for each input of a batch.

    Attributes:
        values: ``[N]`` float32, the value of the prefix that ends at the input.
    """

    values: Tensor


Outputs = TokenOutputs | ValueOutputs
"""Outputs of a language model, or of a critic."""
Kind = TypeVar("Kind", bound=Outputs)


def get_logprobs(outputs: Outputs) -> Tensor:
    """Return logprobs ``[N]`` from outputs that must be a language model's; TypeError where they are a critic's."""
    return require_tokens(outputs).logprobs


def require_tokens(outputs: Outputs) -> TokenOutputs:
    """Return outputs that must be a language model's; TypeError where they are a critic's."""
    if isinstance(outputs, ValueOutputs):
        raise TypeError("outputs: a critic's values, expected logprobs and entropy; ask an engine with head='language'")
    return outputs


def get_values(outputs: Outputs) -> Tensor:
    """Return values ``[N]`` from outputs that must be a critic's; TypeError where they are a language model's."""
    if isinstance(outputs, TokenOutputs):
        raise TypeError("outputs: logprobs and entropy, expected a critic's values; ask an engine with head='value'")
    return outputs.values


def join_outputs(parts: Sequence[Kind]) -> Kind:
    """Join outputs of consecutive sequences end to end, column by column: several ``[n]`` -> ``[N]``."""
    return change_columns(parts[0], lambda name, _: torch.cat([vars(part)[name] for part in parts]))


def list_columns(outputs: Outputs) -> dict[str, Tensor]:
    """Return the columns that outputs have, by their names."""
    return {name: column for name, column in vars(outputs).items() if column is not None}


def change_columns(outputs: Kind, change: Callable[[str, Tensor], Tensor]) -> Kind:
    """Return outputs in which every column is replaced by ``change(name, column)``."""
    return replace(outputs, **{name: change(name, column) for name, column in list_columns(outputs).items()})
