"""Episodes of a step: plays are given samples of the rollout engines, round by round."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completions, Request, Sampling
from engines.models.vision_spec import VisionSpec
from engines.vllm.tools import ToolCalls
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row
from rlworker.episodes.codec import Codec
from rlworker.episodes.courses import Asked, NoteFn
from rlworker.episodes.model import PlayLimits
from rlworker.episodes.processes.pool import PlayPool
from rlworker.episodes.record import EpisodeRecord
from rlworker.episodes.rounds import Rounds
from rlworker.rewards.pool import EXAMPLES, RewardFailure, Scores
from rlworker.rollouts.episodes import batch_episodes
from rlworker.rollouts.to_batch import Group, batch_groups


@dataclass(frozen=True)
class EpisodeGroup(Group):
    """A prompt with its G episodes, what was sampled in all of their turns, and their whole rewards."""

    row: Row
    episodes: list[EpisodeRecord]
    completions: Completions
    rewards: list[float]

    @classmethod
    def collect(cls, row: Row, episodes: list[EpisodeRecord]) -> EpisodeGroup:
        """Group the episodes of a row."""
        completions = Completions.join([one for episode in episodes for one in episode.completions])
        return cls(row, episodes, completions, [episode.reward for episode in episodes])


def set_limits(config: RunConfig) -> PlayLimits:
    """Set the limits of an episode by a run's settings."""
    episodes = config.episodes
    return PlayLimits(
        episodes.turns,
        episodes.tokens or config.longest,
        config.rollout.max_new_tokens,
        episodes.time_limit_s,
        episodes.tool_limit_s,
    )


class Player:
    """Plays episodes with what the rollout engines sample.

    Args:
        default: reward of an episode whose play failed.
    """

    def __init__(self, codec: Codec, pool: PlayPool, rollouts: Rollouts, default: float = 0.0):
        self.codec, self.pool, self.rollouts, self.default = codec, pool, rollouts, default
        self.note_lost: NoteFn | None = None

    def repeat_lost(self, note: NoteFn, stall_timeout_s: float) -> None:
        """Let the episodes of a process that dies or stands still begin anew, from now on; one is to blame only where
        that befalls the next process too.

        Args:
            note: hears which process was lost and what became of it. It raises where the run may not go on.
            stall_timeout_s: seconds after which a process that does not begin stands still.
        """
        self.note_lost = note
        self.pool.limit_stalls(stall_timeout_s)

    def play(self, rows: Sequence[Row], sampling: Sampling) -> list[EpisodeGroup]:
        """Play ``sampling.count`` episodes of each row: ``[P]`` groups.

        Every round draws from a stream of its own, and its episodes' random numbers are of ``sampling.stream``.
        """

        def ask(asked: Sequence[Asked], number: int) -> tuple[Completions, Mapping[int, ToolCalls]]:
            completions = self.rollouts.sample(
                [make_request(one, sampling) for one in asked], (*sampling.stream, number)
            )
            return completions, self._parse_calls(asked, completions)

        options: dict[str, Any] = dict(default=self.default, note_lost=self.note_lost, seed=sampling.stream)
        records, count = Rounds(self.pool, rows, sampling.count, ask, **options).play(), sampling.count
        return [EpisodeGroup.collect(row, records[i * count : (i + 1) * count]) for i, row in enumerate(rows)]

    def _parse_calls(self, asked: Sequence[Asked], completions: Completions) -> dict[int, ToolCalls]:
        """Find the calls of tools in what was sampled, by episode, where a parser was named."""
        calls = {}
        for (parser, tools), here in group_by_parser(asked).items():
            if not parser:
                continue
            texts = self.decode_samples([completions[place].token_ids for place in here])
            found = self.rollouts.parse_tools(texts, parser, json.loads(tools))
            calls |= {asked[place].number: each for place, each in zip(here, found, strict=True)}
        return calls

    def decode_samples(self, samples: Sequence[np.ndarray]) -> list[str]:
        """Decode samples as a parser of tool calls reads them: whole, but for the token that ended each."""
        stops = self.codec.stop_token_ids
        return self.codec.decode_all([ids[:-1] if len(ids) and ids[-1] in stops else ids for ids in samples], False)


def group_by_parser(asked: Sequence[Asked]) -> dict[tuple[str, str], list[int]]:
    """Group the places of samples by parser and tools, as JSON; those for which no parser was named have neither."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, one in enumerate(asked):
        key = (one.parser[0], json.dumps(one.parser[1])) if one.parser else ("", "")
        places.setdefault(key, []).append(place)
    return places


def make_request(asked: Asked, sampling: Sampling, goes_first: bool = False) -> Request:
    """Make the request of a sample that an episode asks for."""
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *asked.stop_token_ids)))
    settings = sampling.temperature, asked.max_tokens, stops, sampling.expected_tokens, sampling.top_logprobs
    return Request(asked.prompt, *settings, goes_first=goes_first)


def batch_played(groups: Sequence[EpisodeGroup], vision: VisionSpec | None = None) -> TrainBatch:
    """Batch the episodes of some groups, with their rewards."""
    if all(episode.is_one_turn for group in groups for episode in group.episodes):  # the same batch, in fewer steps
        return batch_groups(groups, vision)
    return batch_episodes([[episode.list_played() for episode in group.episodes] for group in groups], vision)


def score_episodes(groups: Sequence[EpisodeGroup]) -> Scores:
    """Collect the rewards ``[P * G]`` of episodes, and how some failed."""
    failures, examples, episodes = Counter(), [], [episode for group in groups for episode in group.episodes]
    for episode in episodes:
        if episode.failure:
            kind, message = episode.failure
            failures[kind] += 1
            if failures[kind] <= EXAMPLES:
                examples.append(RewardFailure(kind, episode.row.prompt, "", message))
    return Scores([episode.reward for episode in episodes], dict(failures), examples, "episodes")


def summarise_episodes(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Summarise what episodes have that one turn has not: means over episodes."""
    episodes = [episode for group in groups for episode in group.episodes]
    names: dict[str, Callable[[EpisodeRecord], int]] = {
        "turns": lambda episode: episode.turns,
        "forks": lambda episode: episode.forks,
        "tool_calls": lambda episode: episode.tool_calls,
        "tool_failures": lambda episode: episode.tool_failures,
        "observed_tokens": lambda episode: episode.observed_tokens,
    }
    return {name: sum(map(count, episodes)) / len(episodes) for name, count in names.items()}


def describe_episode(episode: EpisodeRecord, codec: Codec) -> dict:
    """Describe an episode turn by turn, as a run folder's ``rollouts`` has it."""
    rewards: dict[int, float] = {}
    for turn, value in episode.rewards:
        rewards[turn] = rewards.get(turn, 0.0) + value
    turns = []
    for number, pieces in enumerate(episode.sequences):
        texts = codec.decode_all([piece.token_ids for piece in pieces], skip_special=False)
        for place, (piece, text) in enumerate(zip(pieces, texts, strict=True)):
            is_sampled = piece.completion is not None
            turn = {"by": "model" if is_sampled else "environment" if number or place else "prompt", "text": text}
            turn |= {"learns": is_sampled, "reward": rewards.get(piece.turn, 0.0) if is_sampled else 0.0}
            turn |= {"fork": True} if number and not place else {}
            turns.append(turn | ({"images": [image.path for image in piece.images]} if piece.images else {}))
    completions = episode.completions
    return {
        "prompt": episode.row.prompt,
        "completion": "".join(turn["text"] for turn in turns if turn["learns"]),
        "answer": episode.row.answer,
        "reward": episode.reward,
        "version": completions[-1].version if completions else -1,
        "outcome": ": ".join(episode.failure) if episode.failure else "ok",
        "turns": turns,
    }
