"""What is left of an episode: its tokens with who wrote which, its rewards, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engines.batch.samples import Completion, Image
from rlworker.data.rows import Row

CONTEXT = -1
"""Turn of a piece that no turn sampled: prompt and observations."""

FailureKind = Literal["timeout", "blocked", "raised", "limit", "unsampled", "no_episode", "died"]
"""How a play failed. ``timeout``: it awaited for too long something other than a sample; ``blocked``: it held its
process for too long; ``raised``: an exception; ``limit``: it sampled past its turns or tokens; ``unsampled``: it
returned before it sampled; ``no_episode``: it returned something else; ``died``: its process did."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one author.

    Attributes:
        token_ids: ``[T]``. turn: number of the turn that sampled them, ``CONTEXT`` for what the environment wrote.
        images: those whose image tokens are among them, in order.
        completion: what was sampled, where it was.
    """

    token_ids: Sequence[int] | np.ndarray
    turn: int = CONTEXT
    images: tuple[Image, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A played episode.

    Attributes:
        row: the question. sequences: the pieces of each sequence, in order; every fork began another.
        rewards: turn (``CONTEXT`` before the first) and value of each reward.
        failure: kind, and a message with row, turn and line; None where the play returned well.
        tool_calls, tool_failures: tools that it called, and those of them that returned nothing.
    """

    row: Row
    sequences: tuple[tuple[Piece, ...], ...]
    rewards: tuple[tuple[int, float], ...] = ()
    failure: tuple[FailureKind, str] | None = None
    tool_calls: int = 0
    tool_failures: int = 0

    @property
    def reward(self) -> float:
        """The whole reward: the sum of all."""
        return sum(value for _, value in self.rewards)

    @property
    def completions(self) -> list[Completion]:
        """What was sampled, turn by turn."""
        return [piece.completion for pieces in self.sequences for piece in pieces if piece.completion is not None]

    @property
    def turns(self) -> int:
        """Samples of the episode."""
        return len(self.completions)

    @property
    def forks(self) -> int:
        """Times that context was rewritten."""
        return len(self.sequences) - 1

    @property
    def observed_tokens(self) -> int:
        """Tokens that the environment wrote after the prompt, in all sequences."""
        pieces = [piece for pieces in self.sequences for piece in pieces[1:] if piece.turn == CONTEXT]
        return sum(len(piece.token_ids) for piece in pieces)
