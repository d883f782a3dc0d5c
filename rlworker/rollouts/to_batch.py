"""Completions to a batch."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.places import drop_firsts, find_tokens, mark_completions
from engines.batch.samples import Completions, Image
from engines.images.columns import make_image_columns
from engines.models.vision_spec import VisionSpec
from rlworker.data.rows import Row


class Group(ABC):
    """A prompt with what was sampled of it G times, and the rewards."""

    row: Row
    completions: Completions
    rewards: list[float]

    @property
    def has_zero_variance(self) -> bool:
        """Every one of several has the same reward, so that none is better than the others."""
        return len(self.rewards) > 1 and len(set(self.rewards)) == 1


@dataclass(frozen=True)
class PromptGroup(Group):
    """A prompt with its G completions, their texts and rewards."""

    row: Row
    completions: Completions
    texts: list[str]
    rewards: list[float]


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
    numbers = np.repeat(np.arange(len(rows)), size)  # [B], the row of each sequence
    prompt_lengths = np.asarray([len(row.prompt_ids) for row in rows], dtype=np.int64)
    prompt_ids = np.fromiter(chain.from_iterable(row.prompt_ids for row in rows), np.int32, int(prompt_lengths.sum()))
    sampled = mark_completions(prompt_lengths[numbers], completions.lengths)  # [M], as all columns of ids
    token_ids = np.empty(len(sampled), np.int32)
    token_ids[sampled] = completions.token_ids
    token_ids[~sampled] = prompt_ids[find_tokens(prompt_lengths, numbers)]
    logprobs, versions = np.zeros(len(sampled), np.float32), np.full(len(sampled), -1, np.int32)
    logprobs[sampled] = completions.logprobs
    versions[sampled] = np.repeat(completions.span_versions.astype(np.int32), completions.span_lengths)
    top = place_top(completions.top_ids, completions.top_logprobs, sampled)
    return cut_batch(
        token_ids,
        prompt_lengths[numbers] + completions.lengths,
        sampled,
        dict(rollout_logprobs=logprobs, versions=versions) | top,
        [rows[number].images for number in numbers.tolist()] if vision else [],
        vision,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group=torch.from_numpy(numbers),
    )


def batch_groups(groups: Sequence[Group], vision: VisionSpec | None = None) -> TrainBatch:
    """Batch the completions of some groups, with their rewards."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = Completions.concatenate([group.completions for group in groups])
    return to_batch([group.row for group in groups], completions, rewards, vision)


def place_top(ids: np.ndarray | None, logprobs: np.ndarray | None, sampled: np.ndarray) -> dict[str, np.ndarray]:
    """Place the likeliest ids ``[T, k]`` and their logprobs at the ids that were sampled, ``[M]`` bool: columns
    ``[M, k]`` by the batch's names, none in other places; no column where there are none."""
    if ids is None or logprobs is None:
        return {}
    shape = len(sampled), ids.shape[1]
    top_ids, top_logprobs = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
    top_ids[sampled], top_logprobs[sampled] = ids, logprobs
    return dict(rollout_top_ids=top_ids, rollout_top_logprobs=top_logprobs)


def cut_batch(
    token_ids: np.ndarray,
    sizes: np.ndarray,
    sampled: np.ndarray,
    targets: Mapping[str, np.ndarray],
    images: Sequence[tuple[Image, ...]],
    vision: VisionSpec | None,
    **columns: Tensor,
) -> TrainBatch:
    """Cut a batch from sequences of ``sizes [B]`` that are laid end to end.

    Args:
        token_ids, sampled: ``[M]``. targets: further columns ``[M, ...]`` of the ids, which become columns of the
            targets.
        images: of each sequence; read where the model has a ``vision``.
    """
    more: dict[str, Any] = {name: torch.from_numpy(drop_firsts(column, sizes)) for name, column in targets.items()}
    if vision:
        more |= make_image_columns(np.split(token_ids, np.cumsum(sizes)[:-1]), images, vision)
    return TrainBatch.from_stream(token_ids, sizes, sampled, **more | columns)
