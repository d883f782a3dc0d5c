"""Episodes to a batch."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from engines.batch.batch import TrainBatch
from engines.batch.samples import PlayedSequence
from engines.models.vision_spec import VisionSpec
from rlworker.rollouts.to_batch import cut_batch, place_top

_OTHERS = ("rewards", "images", "top_ids", "top_logprobs")
_ID_COLUMNS = tuple(field.name for field in fields(PlayedSequence) if field.name not in _OTHERS)
"""Columns of a ``PlayedSequence`` that have an entry for each id."""


def batch_episodes(
    groups: Sequence[Sequence[Sequence[PlayedSequence]]], vision: VisionSpec | None = None
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
        raise ValueError(f"batch_episodes: episode {int(counts.argmin())} has no sequence, expected one or more")
    group = np.repeat(np.repeat(np.arange(len(groups)), [len(group) for group in groups]), counts)
    sequences = [sequence for episode in episodes for sequence in episode]
    for number, sequence in enumerate(sequences):
        _check_sequence(number, sequence)
    kept = [sequence if sequence.sampled.any() else _keep_first(sequence) for sequence in sequences]
    sizes = np.asarray([len(sequence.token_ids) for sequence in kept], dtype=np.int64)
    stream = {name: np.concatenate([getattr(sequence, name) for sequence in kept]) for name in _ID_COLUMNS}
    sampled = stream["sampled"]
    rewards, turn_rewards = _place_rewards(sequences, sampled, sizes)
    targets = {
        "rollout_logprobs": np.where(sampled, stream["logprobs"], np.float32(0)),
        "versions": np.where(sampled, stream["versions"], np.int32(-1)),
    }
    targets |= place_top(*_join_top([sequence for sequence in sequences if sequence.sampled.any()]), sampled)
    columns = {"rewards": rewards.astype(np.float32), "group": group}
    if len(sequences) > len(episodes) or stream["turns"][sampled].any():
        targets["turn"] = np.where(sampled, stream["turns"], np.int32(-1))
        columns["episode"] = np.repeat(np.arange(len(episodes)), counts)
    if turn_rewards.any():
        targets["turn_rewards"] = turn_rewards.astype(np.float32)
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    images = [sequence.images for sequence in kept]
    return cut_batch(stream["token_ids"], sizes, sampled, targets, images, vision, **tensors)


def _check_sequence(number: int, sequence: PlayedSequence) -> None:
    lengths = {name: len(getattr(sequence, name)) for name in _ID_COLUMNS}
    if len(set(lengths.values())) != 1 or not lengths["token_ids"]:
        raise ValueError(f"batch_episodes: sequence {number} has columns of {lengths}, expected equal lengths from 1")
    if sequence.sampled[0]:
        raise ValueError(f"batch_episodes: sequence {number} has a sampled first id, which nothing predicts")
    for place, _ in sequence.rewards:
        if place != -1 and not (0 <= place < len(sequence.sampled) and sequence.sampled[place]):
            raise ValueError(
                f"batch_episodes: sequence {number} has a reward at place {place}, expected -1 or that of a sampled id"
            )


def _join_top(sequences: Sequence[PlayedSequence]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Lay the likeliest ids and their logprobs, of sequences of which something was sampled, end to end."""
    if all(sequence.top_ids is None for sequence in sequences):
        return None, None
    for number, sequence in enumerate(sequences):
        for column in (sequence.top_ids, sequence.top_logprobs):
            if column is None or len(column) != sequence.sampled.sum():
                raise ValueError(
                    f"batch_episodes: of the sequences with sampled ids number {number} has likeliest ids at "
                    f"{0 if column is None else len(column)} places, expected {sequence.sampled.sum()}, one for each "
                    "sampled id; sample all with the same top_logprobs"
                )
    ids, logprobs = zip(*((sequence.top_ids, sequence.top_logprobs) for sequence in sequences))
    return np.concatenate(ids), np.concatenate(logprobs)


def _keep_first(sequence: PlayedSequence) -> PlayedSequence:
    """Keep the first id alone, which has no target."""
    return PlayedSequence(**{name: getattr(sequence, name)[:1] for name in _ID_COLUMNS})


def _place_rewards(
    sequences: Sequence[PlayedSequence], sampled: np.ndarray, sizes: np.ndarray
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
