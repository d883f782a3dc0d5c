"""Trajectories to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.places import drop_firsts, find_tokens, mark_completions
from engines.batch.samples import Completions, Image, Sampling, TokenSequence
from rlworker.data.rows import Row
from rlworker.environments.record import Trajectory

if TYPE_CHECKING:
    from engines.models.vision_spec import VisionSpec

_OTHERS = ("rewards", "images", "top_ids", "top_logprobs")
_ID_COLUMNS = tuple(column.name for column in fields(TokenSequence) if column.name not in _OTHERS)
"""Columns of a ``TokenSequence`` that have an entry for each id."""


@dataclass(frozen=True)
class TrajectoryGroup:
    """A prompt with the trajectories of its G episodes, the samples of all their turns, and their rewards."""

    row: Row
    trajectories: list[Trajectory]
    completions: Completions
    rewards: list[float]

    @classmethod
    def collect(cls, row: Row, trajectories: list[Trajectory]) -> TrajectoryGroup:
        """Group the trajectories of a row."""
        completions = Completions.join([one for trajectory in trajectories for one in trajectory.completions])
        return cls(row, trajectories, completions, [trajectory.reward for trajectory in trajectories])

    @property
    def has_zero_variance(self) -> bool:
        """Every one of several episodes has the same reward, so that none is better than the others."""
        return len(self.rewards) > 1 and len(set(self.rewards)) == 1


@dataclass(eq=False)
class RolloutBatch:
    """The groups of some rows, each of ``sampling.count`` episodes, as they come.

    Attributes:
        number: unique among all batches. goes_first: before everything that has not begun. first: number of its first
            episode.
        groups: ``[P]``, None where one has not come; completions where ``has_episodes`` is False.
    """

    number: int
    rows: Sequence[Row]
    sampling: Sampling
    goes_first: bool = False
    has_episodes: bool = True
    first: int = 0
    groups: list[Any] = field(default_factory=list)

    def __post_init__(self):
        self.groups = [None] * len(self.rows)
        self._missing = len(self.rows)

    def add(self, place: int, group: Any) -> None:
        """Take in the group of a row."""
        self.groups[place] = group
        self._missing -= 1

    @property
    def is_done(self) -> bool:
        return self._missing == 0


def batch_groups(groups: Sequence[TrajectoryGroup], vision: VisionSpec | None = None) -> TrainBatch:
    """Batch the trajectories of some groups, with their rewards."""
    if all(trajectory.is_one_turn for group in groups for trajectory in group.trajectories):  # in fewer steps
        rewards = [reward for group in groups for reward in group.rewards]
        completions = Completions.concatenate([group.completions for group in groups])
        return to_batch([group.row for group in groups], completions, rewards, vision)
    return batch_sequences([[one.list_sequences() for one in group.trajectories] for group in groups], vision)


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
    top = _place_top(completions.top_ids, completions.top_logprobs, sampled)
    return _cut_batch(
        token_ids,
        prompt_lengths[numbers] + completions.lengths,
        sampled,
        dict(rollout_logprobs=logprobs, versions=versions) | top,
        [rows[number].images for number in numbers.tolist()] if vision else [],
        vision,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group=torch.from_numpy(numbers),
    )


def batch_sequences(
    groups: Sequence[Sequence[Sequence[TokenSequence]]], vision: VisionSpec | None = None
) -> TrainBatch:
    """Batch the episodes of some groups, ``[P][G][sequences of an episode]``.

    A sequence of which nothing was sampled has its rewards and no token: no engine computes it. A reward that was given
    before anything was sampled counts at the first sampled token. Where every episode is one turn, the batch is that of
    ``to_batch``.

    Args:
        vision: of a model that sees images.

    Raises:
        ValueError: an episode has no sequence; columns of a sequence have other lengths than its ids; its first id was
            sampled; a reward's place is none of a sampled id; its image tokens are not those of its images; or some
            sequences have the likeliest ids and others have none, or not of every sampled id.
    """
    episodes = [episode for group in groups for episode in group]
    counts = np.asarray([len(episode) for episode in episodes], dtype=np.int64)
    if not counts.all():
        raise ValueError(f"batch_sequences: episode {int(counts.argmin())} has no sequence, expected one or more")
    group = np.repeat(np.repeat(np.arange(len(groups)), [len(group) for group in groups]), counts)
    sequences = [sequence for episode in episodes for sequence in episode]
    for number, sequence in enumerate(sequences):
        _check_sequence(number, sequence)
    kept = [
        # Of one without samples the first id alone, which has no target.
        one if one.sampled.any() else TokenSequence(**{name: getattr(one, name)[:1] for name in _ID_COLUMNS})
        for one in sequences
    ]
    sizes = np.asarray([len(sequence.token_ids) for sequence in kept], dtype=np.int64)
    stream = {name: np.concatenate([getattr(sequence, name) for sequence in kept]) for name in _ID_COLUMNS}
    sampled = stream["sampled"]
    rewards, turn_rewards = _place_rewards(sequences, sampled, sizes)
    targets = {
        "rollout_logprobs": np.where(sampled, stream["logprobs"], np.float32(0)),
        "versions": np.where(sampled, stream["versions"], np.int32(-1)),
    }
    targets |= _place_top(*_join_top([sequence for sequence in sequences if sequence.sampled.any()]), sampled)
    columns = {"rewards": rewards.astype(np.float32), "group": group}
    if len(sequences) > len(episodes) or stream["turns"][sampled].any():
        targets["turn"] = np.where(sampled, stream["turns"], np.int32(-1))
        columns["episode"] = np.repeat(np.arange(len(episodes)), counts)
    if turn_rewards.any():
        targets["turn_rewards"] = turn_rewards.astype(np.float32)
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    images = [sequence.images for sequence in kept]
    return _cut_batch(stream["token_ids"], sizes, sampled, targets, images, vision, **tensors)


def _check_sequence(number: int, sequence: TokenSequence) -> None:
    lengths = {name: len(getattr(sequence, name)) for name in _ID_COLUMNS}
    if len(set(lengths.values())) != 1 or not lengths["token_ids"]:
        raise ValueError(f"batch_sequences: sequence {number} has columns of {lengths}, expected equal lengths from 1")
    if sequence.sampled[0]:
        raise ValueError(f"batch_sequences: sequence {number} has a sampled first id, which nothing predicts")
    for place, _ in sequence.rewards:
        if place != -1 and not (0 <= place < len(sequence.sampled) and sequence.sampled[place]):
            raise ValueError(
                f"batch_sequences: sequence {number} has a reward at place {place}, expected -1 or that of a sampled id"
            )


def _join_top(sequences: Sequence[TokenSequence]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Lay the likeliest ids and their logprobs, of sequences of which something was sampled, end to end."""
    if all(sequence.top_ids is None for sequence in sequences):
        return None, None
    for number, sequence in enumerate(sequences):
        for column in (sequence.top_ids, sequence.top_logprobs):
            if column is None or len(column) != sequence.sampled.sum():
                raise ValueError(
                    f"batch_sequences: of the sequences with sampled ids number {number} has likeliest ids at "
                    f"{0 if column is None else len(column)} places, expected {sequence.sampled.sum()}, one for each "
                    "sampled id; sample all with the same top_logprobs"
                )
    ids, logprobs = zip(*((sequence.top_ids, sequence.top_logprobs) for sequence in sequences))
    return np.concatenate(ids), np.concatenate(logprobs)


def _place_rewards(
    sequences: Sequence[TokenSequence], sampled: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Place rewards: those at each sequence's last sampled id, ``[B]``, and the others by the id, ``[M]``, both
    float64."""
    rewards, turn_rewards = np.zeros(len(sequences)), np.zeros(len(sampled))
    for number, (sequence, start) in enumerate(zip(sequences, np.cumsum(sizes) - sizes, strict=True)):
        if not sequence.rewards:
            continue
        places = np.flatnonzero(sequence.sampled)
        for place, reward in sequence.rewards:
            if not len(places) or place == places[-1] or (place == -1 and len(places) == 1):
                rewards[number] += reward
            else:
                turn_rewards[start + (places[0] if place == -1 else place)] += reward
    return rewards, turn_rewards


def _place_top(ids: np.ndarray | None, logprobs: np.ndarray | None, sampled: np.ndarray) -> dict[str, np.ndarray]:
    """Place the likeliest ids ``[T, k]`` and their logprobs at the ids that were sampled, ``[M]`` bool: columns
    ``[M, k]`` by the batch's names, none in other places; no column where there are none."""
    if ids is None or logprobs is None:
        return {}
    shape = len(sampled), ids.shape[1]
    top_ids, top_logprobs = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
    top_ids[sampled], top_logprobs[sampled] = ids, logprobs
    return dict(rollout_top_ids=top_ids, rollout_top_logprobs=top_logprobs)


def _cut_batch(
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
        from engines.images.columns import make_image_columns  # a model of text alone loads nothing of images

        more |= make_image_columns(np.split(token_ids, np.cumsum(sizes)[:-1]), images, vision)
    return TrainBatch.from_stream(token_ids, sizes, sampled, **more | columns)
