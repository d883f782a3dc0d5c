"""Completions to a batch, and how far rollout and trainer are apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completions
from engines.images.columns import make_image_columns
from engines.models.vision_spec import VisionSpec
from rlworker.data.rows import Row


@dataclass(frozen=True)
class PromptGroup:
    """A prompt with its G completions, their texts and rewards."""

    row: Row
    completions: Completions
    texts: list[str]
    rewards: list[float]

    @property
    def has_zero_variance(self) -> bool:
        """Every one of several completions has the same reward, so that none is better than the others."""
        return len(self.rewards) > 1 and len(set(self.rewards)) == 1


def to_batch(
    rows: Sequence[Row],
    completions: Completions,
    rewards: Sequence[float],
    vision: VisionSpec | None = None,
) -> TrainBatch:
    """Turn prompts ``[P]`` and their completions and rewards, both ``[P * G]``, into a batch of ``P * G`` sequences.

    Args:
        vision: of a model that sees images.

    Raises:
        ValueError: a sequence has other image tokens than its row's images, or rows have no equal numbers of
            completions.
    """
    size, rest = divmod(len(completions), len(rows))
    if rest:
        raise ValueError(f"to_batch: {len(completions)} completions of {len(rows)} rows, expected as many of each row")
    pairs = [(rows[i // size], sample) for i, sample in enumerate(completions)]
    prompt_lengths = [len(row.prompt_ids) for row, _ in pairs]
    sequences = [[*row.prompt_ids, *sample.token_ids] for row, sample in pairs]
    columns = {}
    if vision:
        columns = make_image_columns(sequences, [row.images for row, _ in pairs], vision)
    batch = TrainBatch.from_ids(
        sequences,
        prompt_lengths,
        **columns,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group=torch.from_numpy(np.repeat(np.arange(len(rows)), size)),
    )
    # The batch's counting targets are the sampled tokens, in the same order.
    mask = batch.mask.numpy()
    logprobs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    logprobs[mask] = completions.logprobs
    versions[mask] = np.repeat(completions.span_versions, completions.span_lengths)
    return replace(batch, rollout_logprobs=torch.from_numpy(logprobs), versions=torch.from_numpy(versions))


def batch_groups(groups: Sequence[PromptGroup], vision: VisionSpec | None = None) -> TrainBatch:
    """Batch the completions of some groups, with their rewards."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = Completions.concatenate([group.completions for group in groups])
    return to_batch([group.row for group in groups], completions, rewards, vision)


def compare_logprobs(batch: TrainBatch, logprobs: torch.Tensor) -> dict[str, float]:
    """Measure |rollout - trainer logprob| over the sampled tokens, both taken from the same weights; where some
    sequences have images, over theirs alone as well."""
    difference = (batch.require_column("rollout_logprobs") - logprobs)[batch.mask].abs()
    result = {"logprob_diff_mean": float(difference.mean()), "logprob_diff_max": float(difference.max())}
    if batch.images and any(batch.images):
        has_images = batch.repeat_per_token(torch.tensor([bool(images) for images in batch.images]))[batch.mask]
        seeing = difference[has_images]
        result |= {"logprob_diff_pictures_mean": float(seeing.mean()), "logprob_diff_pictures_max": float(seeing.max())}
    return result
