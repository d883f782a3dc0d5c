"""The policy as an environment has it: samples, and tools that run in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from random import Random
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from rlworker.environments.codec import Stops
from rlworker.environments.episode import Episode
from rlworker.environments.record import Sample

ToolFailureKind = Literal["timeout", "raised", "memory", "died", "unpicklable"]
"""Why a tool returned nothing: no end in time, an exception, no memory left, a process that ended, or a result that
cannot be sent."""


class ToolFailure(Exception):
    """A tool returned nothing: its limit, its exception or its process's end. An environment may catch it.

    Attributes:
        kind: why. message: what happened.
    """

    def __init__(self, kind: ToolFailureKind, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message

    def __reduce__(self) -> tuple:
        return ToolFailure, (self.kind, self.message)


class EpisodeLimit(Exception):
    """An environment samples past a limit of ``config.environment``: turns, or tokens. It may catch this and end the
    episode."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode.

    Attributes:
        turns: most samples. tokens: most tokens of a sequence. sample_tokens: most of one sample.
        time_limit_s: seconds of an environment in which it awaits neither a sample nor a tool. tool_limit_s: of a tool
            call without a limit of its own.
    """

    turns: int
    tokens: int
    sample_tokens: int
    time_limit_s: float
    tool_limit_s: float


class Host(Protocol):
    """The process that runs an environment, and answers its policy."""

    limits: EpisodeLimits

    async def sample(self, policy: Policy, episode: Episode, max_tokens: int, stop: Stops) -> Sample: ...

    async def call_tool(
        self, policy: Policy, call: Callable, args: tuple, keywords: Mapping[str, Any], limit_s: float, memory_mb: int
    ) -> Any: ...


class Policy:
    """The policy as the environment of one episode sees it.

    Attributes:
        number: of the episode among all that run. episode: the last one that was sampled for.
    """

    def __init__(self, host: Host, number: int, seed: tuple[int, ...]):
        self._host, self._seed = host, seed
        self.number = number
        self.episode: Episode | None = None

    @cached_property
    def random(self) -> Random:
        """Random numbers of this episode, the same whenever the run is repeated."""
        return Random(int(np.random.SeedSequence(self._seed).generate_state(1, np.uint64)[0]))

    async def sample(self, episode: Episode, *, max_tokens: int | None = None, stop: Stops = ()) -> Sample:
        """Sample a turn from the episode's context, and append it; these tokens are trained.

        Args:
            max_tokens: most tokens; None takes ``rollout.max_new_tokens``, which is the most there may be.
            stop: a further token, or several, that end the sample and belong to it: ids, or texts of one token each.

        Raises:
            EpisodeLimit: the episode has all the turns or tokens that it may have.
            ValueError: a stop is no token, or max_tokens no whole number from 1.
        """
        limits = self._host.limits
        self.episode = episode
        most = limits.sample_tokens if max_tokens is None else min(max_tokens, limits.sample_tokens)
        if not isinstance(most, Integral) or most < 1:
            raise ValueError(f"sample: max_tokens={max_tokens}, expected a whole number, 1 or more")
        if episode.turns >= limits.turns:
            raise EpisodeLimit(f"turn {episode.turns + 1} of at most {limits.turns}; raise --environment.turns")
        room = limits.tokens - len(episode)
        if room < 1:
            raise EpisodeLimit(
                f"the sequence has {len(episode)} tokens and may have {limits.tokens}; raise --environment.tokens"
            )
        return await self._host.sample(self, episode, int(min(most, room)), stop)

    async def tool(
        self,
        call: Callable,
        *args: Any,
        keywords: Mapping[str, Any] = MappingProxyType({}),
        limit_s: float | None = None,
        memory_mb: int = 1024,
    ) -> Any:
        """Call ``call(*args, **keywords)`` in a process of its own, which ends with everything that it started.

        What an ``async`` function returns is awaited there.

        The limits keep a run alive against code that hangs, forks or eats memory. They are no security boundary: the
        process has the user's rights, files and network. Code that is hostile belongs into a sandbox of its own.

        Args:
            keywords: arguments by name, in a mapping: the names of some may be those of the limits.
            limit_s: seconds; None takes ``environment.tool_limit_s``.
            memory_mb: most memory that each of its processes may take, in MB, beyond what it starts with.

        Returns:
            what the call returned, sent by pickle.

        Raises:
            ToolFailure: it did not end in time, raised, died or returned what cannot be sent.
            ValueError: a limit is none, or the call cannot be sent to another process.
        """
        limit = self._host.limits.tool_limit_s if limit_s is None else limit_s
        if not (0 < limit <= _LONGEST_S and isinstance(memory_mb, Integral) and memory_mb > 0):
            raise ValueError(
                f"tool: limit_s={limit_s} and memory_mb={memory_mb}, expected seconds above 0, at most "
                f"{_LONGEST_S:g}, and a whole number of MB, 1 or more"
            )
        return await self._host.call_tool(self, call, args, keywords, limit, memory_mb)


_LONGEST_S = 1e6
"""Most seconds that a tool may be given: a timer takes no infinite number."""
