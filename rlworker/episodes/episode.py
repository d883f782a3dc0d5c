"""An episode: tokens in the order in which they were written, and who wrote which.

Tokens go in and tokens come out. What was sampled is kept by its ids and never encoded again; only what the
environment writes goes through the tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from engines.batch.samples import Image
from rlworker.data.rows import Row
from rlworker.episodes.codec import Content, get_codec

CONTEXT = -1
"""Turn of a piece that no turn sampled: prompt and observations."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one author.

    Attributes:
        token_ids: ``[T]``. turn: number of the turn that sampled them, ``CONTEXT`` for what the environment wrote.
        images: those whose image tokens are among them, in order.
    """

    token_ids: Sequence[int] | np.ndarray
    turn: int = CONTEXT
    images: tuple[Image, ...] = ()


class Episode:
    """What a play and the model have written so far; a play makes one, and returns it.

    It begins with the row's prompt and images. ``Model.sample`` appends what the model writes, which is trained;
    ``observe`` what the environment writes, which is context::

        episode = Episode(row)
        sample = await model.sample(episode)
        episode.observe(look_up(sample.text))
        sample = await model.sample(episode)
        episode.reward(float(sample.text == row.answer))

    Args:
        prompt: ids, text or chat messages to begin with in the place of the row's prompt.
        images: of that prompt.
        tools: JSON schemas of tools, which the chat template shows to the model.
        tool_parser: name of vLLM's parser of this model's tool calls, such as ``hermes``; fills ``Sample.calls``.

    Attributes:
        row: the question. turns: samples so far. forks: sequences begun by ``fork``.
        chat: the messages so far where the prompt has some; each sample is one of role ``assistant``.
        rewards: turn (``CONTEXT`` before the first) and value of each reward.
    """

    def __init__(
        self,
        row: Row,
        prompt: Content | None = None,
        *,
        images: Sequence[Any] = (),
        tools: Sequence[Mapping] = (),
        tool_parser: str = "",
    ):
        self.row, self.tools, self.tool_parser = row, tuple(tools), tool_parser
        self.turns = self.forks = 0
        self.chat: list[dict] = []
        self.rewards: list[tuple[int, float]] = []
        self._length = 0
        self._sequences: list[list[Piece]] = []
        if prompt is None and not tools:
            # By the row alone, which the driver has as well: nothing has to be sent back.
            self._begin(Piece(row.prompt_ids, images=row.images))
        else:
            self._begin(get_codec().encode_prompt(self, prompt, images))

    def __len__(self) -> int:
        """Tokens of the sequence that is being written."""
        return self._length

    @property
    def sequences(self) -> list[list[Piece]]:
        """The pieces of each sequence; every fork begins another."""
        return self._sequences

    @property
    def token_ids(self) -> list[int]:
        """Ids ``[T]`` of the sequence that is being written."""
        return [int(token) for piece in self._sequences[-1] for token in piece.token_ids]

    def observe(self, content: Content, images: Sequence[Any] = ()) -> None:
        """Append what the environment wrote: context for what is sampled next, never trained.

        Args:
            content: ids; text, encoded without special tokens of the tokenizer's own; or chat messages, of which the
                template's own remainder is appended. Where the template rewrites what came before, they ``fork``.
            images: paths, bytes or Pillow's images, one for each ``<image>`` of the text or image token of the ids.

        Raises:
            ValueError: it cannot be encoded, or has places for another number of images.
        """
        piece, rewrites = get_codec().encode_observation(self, content, images)
        if rewrites:
            self.forks += 1
            self._begin(piece)
        else:
            self._append(piece)

    def fork(self, content: Content, images: Sequence[Any] = ()) -> None:
        """Begin another sequence of this episode, where the context was rewritten: summarised, cut, or without earlier
        thinking. What was sampled before stays trained in the sequence where it was sampled.

        Args:
            content, images: the whole new context, as for ``observe``.
        """
        self.forks += 1
        self._begin(get_codec().encode_prompt(self, content, images))

    def reward(self, value: float) -> None:
        """Give a reward at the last sampled token; several make rewards per turn, and the episode's is their sum.

        Before anything was sampled it counts for the episode alone.

        Raises:
            ValueError: it is no finite number that fits float32.
        """
        number = float(value)
        if not isfinite(number) or abs(number) > _LARGEST:
            raise ValueError(f"Episode: reward {value!r} is no finite number of float32; give one")
        self.rewards.append((self.turns - 1, number))

    def add_sample(self, token_ids: np.ndarray, text: str) -> None:
        """Append what the model sampled in this turn; ``Model.sample`` does so."""
        self._append(Piece(token_ids, self.turns))
        self.turns += 1
        if self.chat:
            self.chat.append({"role": "assistant", "content": text})

    def _begin(self, piece: Piece) -> None:
        self._sequences.append([piece])
        self._length = len(piece.token_ids)

    def _append(self, piece: Piece) -> None:
        self._sequences[-1].append(piece)
        self._length += len(piece.token_ids)
