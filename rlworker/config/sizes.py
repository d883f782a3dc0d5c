"""Sizes that follow from the settings of a run."""

from typing import TYPE_CHECKING, cast

from rlworker.config.run import RunConfig, TrainingConfig

if TYPE_CHECKING:
    from rlworker.config.sft import SftConfig

_TOKEN_BYTES = 100
"""Bytes of a token in a batch that has every column of ``TrainBatch`` with one entry."""
_TOP_BYTES = 12
"""Bytes of one of its likeliest ids: the id, and two log-probabilities."""


def count_batch_bytes(config: TrainingConfig) -> int:
    """Count the bytes that the largest batch of a run takes between its processes, with the results beside it."""
    if isinstance(config, RunConfig):
        top = _TOP_BYTES * max(config.algorithm.score_centering, config.rollout.top_k)
        return 2 * (_TOKEN_BYTES + top) * config.samples_per_step * config.longest
    supervised = cast("SftConfig", config)
    return 2 * _TOKEN_BYTES * supervised.rows_per_step * supervised.longest
