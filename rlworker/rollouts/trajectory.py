"""Turn trajectories into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.batch.batch import COLUMNS, TrainBatch
from engines.batch.places import drop_firsts
from engines.batch.samples import Completion, Sampling
from engines.images import make_columns
from hardware.megatron.form import NO_ROUTE
from rlworker.base.errors import RunError
from rlworker.data.rows import Row
from rlworker.environments.record import CONTEXT, Segment, Trajectory

if TYPE_CHECKING:
    from engines.models.vision.vision_spec import VisionSpec

Key = tuple[int, int, int, int]
"""Name of a request: number of its rollout batch; number of the episode, or of the prompt's first episode, or of the
row if no environment runs; number of the turn; and hash of the request, 0 if it continues a row's prompt."""
TrajectoryGroup = list[Trajectory]
"""The trajectories of a prompt's G episodes."""


@dataclass(eq=False)
class RolloutBatch:
    """The rows of a rollout, and their groups as they finish.

    Attributes:
        number: unique among all batches.
        rows: the P rows. sampling: its ``count`` is the number of episodes of each row.
        goes_first: whether its requests are sampled before all others that have not begun.
        has_episodes: False where rows are sampled without an environment.
        first: number of its first episode.
        drawn: the samples of its episodes so far. An episode that runs again is given those that it asks for again.
        groups: ``[P]``, each a ``TrajectoryGroup``, completions if no environment runs, or None until it has come.
    """

    number: int
    rows: Sequence[Row]
    sampling: Sampling
    goes_first: bool = False
    has_episodes: bool = True
    first: int = 0
    drawn: dict[Key, Completion] = field(default_factory=dict)
    groups: list[Any] = field(default_factory=list)

    def __post_init__(self):
        self.groups = [None] * len(self.rows)
        self._missing = len(self.rows)

    def add(self, place: int, group: Any) -> None:
        """Store the group of row number ``place``."""
        self.groups[place] = group
        self._missing -= 1

    @property
    def is_done(self) -> bool:
        return self._missing == 0


def has_zero_variance(group: TrajectoryGroup) -> bool:
    """Tell whether the group has several episodes, all with the same reward: none is better than another."""
    return len(group) > 1 and len({trajectory.reward for trajectory in group}) == 1


def batch_groups(groups: Sequence[TrajectoryGroup], vision: VisionSpec | None = None) -> TrainBatch:
    """Make a batch of the trajectories of some groups: every sequence of a trajectory becomes a sequence of the batch.

    A sequence in which nothing was sampled keeps its rewards and has no token, so that no engine computes it. A reward
    that was given before the first sample counts at the first sampled token.

    Args:
        vision: description of a model that sees images; None for text.

    Raises:
        ValueError: the image tokens of a sequence do not match its images, or only some samples have logprobs, those
            of the likeliest ids, or routes.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    counts = [len(trajectory.sequences) for trajectory in trajectories]
    episode = np.repeat(np.arange(len(trajectories)), counts)  # [B], of each sequence
    group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[episode]
    sequences = [
        # Of one without samples the first id alone, which has no target.
        sequence if any(segment.turn != CONTEXT for segment in sequence) else [Segment(sequence[0].token_ids[:1])]
        for trajectory in trajectories
        for sequence in trajectory.sequences
    ]
    segments = [segment for sequence in sequences for segment in sequence]
    lengths = np.asarray([len(segment.token_ids) for segment in segments], np.int64)
    sizes = np.asarray([sum(len(segment.token_ids) for segment in sequence) for sequence in sequences], np.int64)
    # A prompt is one object in all episodes of its row, and made an array once.
    arrays = {id(segment.token_ids): segment.token_ids for segment in segments}
    arrays = {key: np.asarray(ids, np.int32) for key, ids in arrays.items()}
    token_ids = np.concatenate([arrays[id(segment.token_ids)] for segment in segments])  # [M], as all columns of ids
    turns = np.repeat(np.asarray([segment.turn for segment in segments], np.int32), lengths)
    sampled = turns != CONTEXT
    targets = _place_samples([completion for one in trajectories for completion in one.completions], sampled)
    rewards, turn_rewards = _place_rewards(trajectories, sequences, len(sampled))
    columns = {"rewards": rewards.astype(np.float32), "group": group}
    if len(sequences) > len(trajectories) or turns[sampled].any():
        targets["turn"], columns["episode"] = turns, episode
    if turn_rewards.any():
        targets["turn_rewards"] = turn_rewards.astype(np.float32)
    routes = [one.routes for trajectory in trajectories for one in trajectory.completions if one.routes is not None]
    if routes:
        columns["routes"] = _place_routes(sequences, sizes, routes[0].shape[1:])
    tensors: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
    tensors |= {name: torch.from_numpy(drop_firsts(column, sizes)) for name, column in targets.items()}
    if vision:
        images = [tuple(image for segment in sequence for image in segment.images) for sequence in sequences]
        tensors |= make_columns(np.split(token_ids, np.cumsum(sizes)[:-1]), images, vision)
    return TrainBatch.from_stream(token_ids, sizes, sampled, **tensors)


def to_batch(
    rows: Sequence[Row], completions: Sequence[Completion], rewards: Sequence[float], vision: VisionSpec | None = None
) -> TrainBatch:
    """Make a batch of P prompts with their completions and rewards, both ``[P * G]``, as episodes of one turn.

    Args:
        vision: description of a model that sees images; None for text.

    Raises:
        ValueError: the number of completions is no multiple of P, or any reason of ``batch_groups``.
    """
    size, rest = divmod(len(completions), len(rows))
    if rest:
        raise ValueError(
            f"to_batch: got {len(completions)} completions for {len(rows)} rows, expected equally many for each row"
        )
    trajectories = []
    for place, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        row = rows[place // size]
        segments = Segment(row.prompt_ids, images=row.images), Segment(completion.token_ids, 0, (), completion)
        trajectories.append(Trajectory(row, (segments,), ((0, reward),)))
    return batch_groups([trajectories[start : start + size] for start in range(0, len(trajectories), size)], vision)


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


def _place_samples(completions: Sequence[Completion], sampled: np.ndarray) -> dict[str, np.ndarray]:
    """Place the numbers of sampled ids at these, ``[M]`` bool: columns ``[M]`` and ``[M, k]`` by the batch's names.

    Raises:
        ValueError: as ``batch_groups``.
    """
    size, tokens = len(sampled), int(sampled.sum())
    columns = {"rollout_logprobs": np.zeros(size, np.float32), "versions": np.full(size, -1, np.int32)}
    spans = np.asarray([span for completion in completions for span in completion.spans], np.int64).reshape(-1, 2)
    columns["versions"][sampled] = np.repeat(spans[:, 0], spans[:, 1])
    for name, about in COLUMNS.items():
        entries = [getattr(completion, about.sampled) for completion in completions] if about.sampled else []
        entries = [numbers for numbers in entries if numbers is not None]
        known = sum(map(len, entries))
        if known not in (0, tokens):
            raise ValueError(
                f"completions: {tokens} sampled ids and {about.sampled} of {known}, expected of all or of none; draw "
                "all completions of a batch by the same settings, greedily or not"
            )
        if known:  # no logprobs where they were drawn greedily
            found = np.concatenate(entries)
            columns[name] = np.full((size, *found.shape[1:]), about.blank, found.dtype)
            columns[name][sampled] = found
    return columns


def _place_routes(sequences: Sequence[Sequence[Segment]], sizes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Place the experts of each input, ``[N, layers, k]`` int16: those of the first completion that follows it, and
    ``NO_ROUTE`` where none does.

    Args:
        sizes: ``[B]``, ids of each sequence. shape: layers and k.

    Raises:
        ValueError: a completion has no experts, or those of other tokens than come before it.
    """
    routes, start = np.full((int(sizes.sum()) - len(sizes), *shape), NO_ROUTE, np.int16), 0
    for sequence, size in zip(sequences, sizes.tolist(), strict=True):
        end = known = 0
        for segment in sequence:
            end += len(segment.token_ids)
            if segment.completion is None:
                continue
            found = segment.completion.routes
            if found is None or len(found) != end - 1:
                raise ValueError(
                    f"completions: one has the experts of {0 if found is None else len(found)} tokens, expected of the "
                    f"{end - 1} before its last; draw all completions of a batch with replay_routes or none"
                )
            routes[start + known : start + end - 1] = found[known:]
            known = end - 1
        start += size - 1
    return routes


def _place_rewards(
    trajectories: Sequence[Trajectory], sequences: Sequence[Sequence[Segment]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Place rewards: those at each sequence's last sampled id, ``[B]``, and the others by the id, ``[size]``, both
    float64."""
    rewards, turn_rewards = np.zeros(len(sequences)), np.zeros(size)
    number = end = 0
    for trajectory in trajectories:
        first, places = number, {}  # turn -> its sequence, and the place of its last id
        last: dict[int, int] = {}  # sequence -> place of its last sampled id
        for sequence in sequences[first : first + len(trajectory.sequences)]:
            for segment in sequence:
                start, end = end, end + len(segment.token_ids)
                if segment.turn != CONTEXT:
                    places[segment.turn], last[number] = (number, end - 1), end - 1
                    if number == first:
                        places.setdefault(CONTEXT, (number, start))
            number += 1
        for turn, value in trajectory.rewards:
            owner, place = places.get(turn, (first, -1))
            if place == last.get(owner, -1):
                rewards[owner] += value
            else:
                turn_rewards[place] += value
    return rewards, turn_rewards
