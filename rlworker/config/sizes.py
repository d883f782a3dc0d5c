"""Sizes that follow from the settings of a run."""

from typing import TYPE_CHECKING, cast

from rlworker.config.run import RunConfig, TrainingConfig

if TYPE_CHECKING:
    from rlworker.config.sft import SftConfig

_TOKEN_BYTES = 100
"""Bytes of a token in a batch with every column of ``TrainBatch`` that has one entry per token."""
_TOP_BYTES = 12
"""Bytes of one of the likeliest ids of a token: the id, and the log-probabilities of two models."""


def count_batch_bytes(config: TrainingConfig) -> int:
    """Count the bytes in Ray's object store while the largest batch of a run travels between processes.

    The count is twice the batch at its longest, since the ranks' results are in the store at the same time.
    """
    if isinstance(config, RunConfig):
        top = _TOP_BYTES * max(config.top_logprobs, config.rollout.top_k)
        return 2 * (_TOKEN_BYTES + top) * config.samples_per_step * config.longest
    supervised = cast("SftConfig", config)
    return 2 * _TOKEN_BYTES * supervised.rows_per_step * supervised.longest
