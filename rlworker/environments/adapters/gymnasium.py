"""Play a Gymnasium environment whose observations and actions are, or can be written as, text."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlworker.data.rows import Row
from rlworker.environments.episode import Episode
from rlworker.environments.policy import EpisodeLimit, Policy


@dataclass(frozen=True)
class GymnasiumEnvironment:
    """An environment whose observations and rewards are those of a Gymnasium environment.

    All episodes of a row begin in the same state: the seed is the row's field ``seed``, or a checksum of its prompt
    where it has none: tables fill it up with null or NaN.

    Attributes:
        make: makes the Gymnasium environment of a row.
        read: reads the action from the model's text, given the Gymnasium environment; a ValueError says to the model
            why it is none.
        spell: writes an observation as text.
    """

    make: Callable[[Row], Any]
    read: Callable[[str, Any], Any] = lambda text, game: text.strip()
    spell: Callable[[Any], str] = str

    async def __call__(self, policy: Policy, row: Row) -> Episode:
        game = self.make(row)
        try:
            observation, _ = game.reset(seed=read_seed(row))
            if row.messages:
                episode = Episode(row, [*row.messages, {"role": "user", "content": self.spell(observation)}])
            else:
                episode = Episode(row)
                episode.observe(f"{self.spell(observation)}\n")
            while True:
                try:
                    sample = await policy.sample(episode)
                except EpisodeLimit:
                    return episode
                try:
                    action = self.read(sample.text, game)
                except ValueError as error:
                    self._tell(episode, f"error: {error}")
                    continue
                observation, reward, has_ended, is_cut, _ = game.step(action)
                episode.reward(float(reward))
                if has_ended or is_cut:
                    return episode
                self._tell(episode, self.spell(observation))
        finally:
            game.close()

    def _tell(self, episode: Episode, text: str) -> None:
        episode.observe({"role": "user", "content": text} if episode.row.messages else f"\n{text}\n")


def read_seed(row: Row) -> int:
    """Read the seed of a row, or make one of its prompt.

    Raises:
        ValueError: the seed is no whole number.
    """
    seed = row.source.get("seed")
    if seed is None or seed != seed:
        return zlib.crc32(row.prompt.encode())
    try:
        is_whole = int(seed) == float(seed)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"Gymnasium: the row of prompt {row.prompt!r:.80} has seed {seed!r:.40}, expected a whole number"
        )
    return int(seed)
