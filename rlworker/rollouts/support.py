"""Support replay: the trainer masks its logits at each place to the ids that truncated sampling kept there."""

from dataclasses import replace

import torch

from engines.batch.batch import TrainBatch
from rlworker.errors import RunError


def replay_support(batch: TrainBatch) -> TrainBatch:
    """Return the batch with the ids that sampling kept at each place as ``support`` ``[N, k]``, -1 where there are
    fewer.

    k is the most that any place kept. The columns of the sampler's likeliest ids are removed.

    Args:
        batch: drawn with ``top_logprobs`` equal to the sampler's ``top_k``; an id of -1 was not kept.

    Raises:
        RunError: a sampled id is not among the ids that were kept, so that the trainer would give it no probability.
    """
    kept = batch.require_column("rollout_top_ids")
    outside = batch.mask & ~(kept == batch.targets[:, None]).any(-1)
    if outside.any():
        place = int(outside.nonzero()[0, 0])
        sequence = int(torch.searchsorted(torch.tensor(batch.lengths).cumsum(0), place, right=True))
        raise RunError(
            f"rollout: sequence {sequence} of the batch has id {int(batch.targets[place])} at place {place}, which is "
            f"none of the {int((kept[place] >= 0).sum())} ids that sampling kept there: the rollout engine drew from "
            "another distribution than it reported; leave --rollout.top-k, --rollout.top-p and --rollout.min-p out"
        )
    most = int((kept >= 0).sum(-1).max())
    return replace(batch, support=kept[:, :most], rollout_top_ids=None, rollout_top_logprobs=None)
