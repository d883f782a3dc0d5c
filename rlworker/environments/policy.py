"""The policy as an environment sees it: it samples turns, and runs tools in separate processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from random import Random
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from rlworker.data.rows import Row
from rlworker.environments.codec import Stops
from rlworker.environments.episode import Episode
from rlworker.environments.record import Sample, Verdict

ToolFailureKind = Literal["timeout", "raised", "memory", "died", "unpicklable"]
"""Why a tool returned nothing: it did not end in time, raised an exception, had no memory left, its process ended, or
its result cannot be pickled."""


class ToolFailure(Exception):
    """A tool call failed: it reached a limit, raised an exception, or its process ended. An environment may catch this.

    Attributes:
        kind: one of ``ToolFailureKind``. message: describes the failure.
    """

    def __init__(self, kind: ToolFailureKind, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message

    def __reduce__(self) -> tuple:
        return ToolFailure, (self.kind, self.message)


class NoVerdict(Exception):
    """A served model gave no verdict: its answer could not be read, or it could not be asked. An environment may catch
    this."""


class EpisodeLimit(Exception):
    """An environment samples past its limit of turns or tokens. It may catch this and end the episode."""


@dataclass(frozen=True)
class Endpoint:
    """An address of OpenAI's API at which an agent plays one episode; ``Policy.endpoint`` opens it.

    Attributes:
        base_url: the address, which a client takes as its base URL. Whoever knows it may play the episode.
        episode: the episode that the agent's calls write. The environment rewards and returns it.
    """

    base_url: str
    episode: Episode


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode.

    Attributes:
        turns: most samples.
        tokens: most tokens of a sequence.
        sample_tokens: most tokens of one sample.
        time_limit_s: most seconds of an environment, not counting its waits for samples, tools and verdicts.
        tool_limit_s: most seconds of a tool call that sets no ``limit_s``.
        drawing: settings by which the run samples, ``temperature`` and ``top_p``. No call may ask for others.
    """

    turns: int
    tokens: int
    sample_tokens: int
    time_limit_s: float
    tool_limit_s: float
    drawing: Mapping[str, float] = field(default_factory=dict)


class Host(Protocol):
    """The process that runs an environment. It carries out the calls of the environment's policy."""

    limits: EpisodeLimits

    async def sample(self, policy: Policy, episode: Episode, max_tokens: int, stop: Stops) -> Sample: ...

    async def call_tool(
        self, policy: Policy, call: Callable, args: tuple, keywords: Mapping[str, Any], limit_s: float, memory_mb: int
    ) -> Any: ...

    def open_endpoint(self, policy: Policy, row: Row, tool_parser: str, host: str) -> Endpoint: ...

    async def ask_model(self, policy: Policy, model: str, content: Any) -> Verdict: ...


class Policy:
    """The policy as the environment of one episode sees it.

    Args:
        host: carries out its calls.
        number: number of the episode.
        seed: seed of ``random``.

    Attributes:
        number: number of the episode, counted from the start of the program.
        episode: the ``Episode`` that the policy last sampled for; None before the first sample.
    """

    def __init__(self, host: Host, number: int, seed: tuple[int, ...]):
        self._host, self._seed = host, seed
        self.number = number
        self.episode: Episode | None = None

    @cached_property
    def random(self) -> Random:
        """Random numbers of this episode, which are the same whenever the run is repeated."""
        return Random(int(np.random.SeedSequence(self._seed).generate_state(1, np.uint64)[0]))

    async def sample(self, episode: Episode, *, max_tokens: int | None = None, stop: Stops = ()) -> Sample:
        """Sample a turn from the episode's context and append it to the episode. Its tokens are trained.

        Args:
            episode: the episode to continue.
            max_tokens: most tokens; None, like any larger number, means ``rollout.max_new_tokens``.
            stop: one or several further tokens that end the sample and belong to it: ids, or texts of one token each.

        Raises:
            EpisodeLimit: the episode has reached its limit of turns or tokens.
            RuntimeError: the policy has sampled for another ``Episode``, whose turns the trainer would learn from.
            ValueError: a stop is not one token, or ``max_tokens`` is not a whole number of 1 or more.
        """
        limits = self._host.limits
        if self.episode not in (None, episode):
            raise RuntimeError(
                "sample: this policy has sampled for another Episode, and an environment plays one; continue that one, "
                "or go on from another context by its fork()"
            )
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

    def endpoint(self, row: Row, *, tool_parser: str = "", host: str = "127.0.0.1") -> Endpoint:
        """Open an address of OpenAI's API for this episode, which any client in any process of this node may call.

        Every call samples a turn, as ``sample`` does. Its messages are compared with the episode's: what follows them
        is observed, and a history that was rewritten begins a new sequence. The address is closed as the episode ends::

            endpoint = policy.endpoint(row)
            client = AsyncOpenAI(base_url=endpoint.base_url, api_key="-")
            answer = await play(client, row.messages)
            endpoint.episode.reward(float(answer == row.answer))
            return endpoint.episode

        A client that waits without ``await`` belongs in a thread, by ``asyncio.to_thread``, or in another process.

        Args:
            row: the question. Until the first call the episode is the row's prompt.
            tool_parser: name of vLLM's parser for this model's tool calls, for calls with ``tools``.
            host: address at which it listens. Loopback serves agents of this node; ``0.0.0.0`` serves those in
                containers and on other machines too, and the base URL then has the node's own address.

        Raises:
            ValueError: the episode has an endpoint, vLLM has no parser of that name, or the node has no such address.
        """
        return self._host.open_endpoint(self, row, tool_parser, host)

    async def tool(
        self,
        call: Callable,
        *args: Any,
        keywords: Mapping[str, Any] = MappingProxyType({}),
        limit_s: float | None = None,
        memory_mb: int = 1024,
    ) -> Any:
        """Call ``call(*args, **keywords)`` in a separate process, which ends with everything that it started.

        The awaitable that an ``async`` function returns is awaited there.

        The limits keep a run alive against code that hangs, forks or eats memory. They are no security boundary: the
        process has the user's rights, files and network. Run hostile code in a sandbox of your own.

        Args:
            keywords: arguments by name, as a mapping, since they may be named like the limits.
            limit_s: most seconds; None means ``environment.tool_limit_s``.
            memory_mb: most memory, in MB, that each process of the call may take beyond its memory at the start.

        Returns:
            the result of the call, which is sent by pickle.

        Raises:
            ToolFailure: the call did not end in time, raised, died, or its result cannot be pickled.
            ValueError: a limit is out of range, or the call cannot be sent to another process.
        """
        limit = self._host.limits.tool_limit_s if limit_s is None else limit_s
        if not (0 < limit <= _LONGEST_S and isinstance(memory_mb, Integral) and memory_mb > 0):
            raise ValueError(
                f"tool: limit_s={limit_s} and memory_mb={memory_mb}, expected seconds above 0, at most "
                f"{_LONGEST_S:g}, and a whole number of MB, 1 or more"
            )
        return await self._host.call_tool(self, call, args, keywords, limit, memory_mb)

    async def judge(self, *models: str, **fields: Any) -> Verdict:
        """Ask one or several judges of the run by their names, and return their verdict, from 0 to 1.

        Several judges are asked at once, and the mean of those that can be read is the verdict.

        Args:
            fields: fields of the judge's prompt, such as ``question``, ``answer`` and ``text``: plain values.

        Raises:
            NoVerdict: no answer can be read, or a judge cannot be asked.
        """
        found = await asyncio.gather(*(self._host.ask_model(self, name, fields) for name in models))
        readable = [each for each in found if not each.error]
        if not readable:
            raise NoVerdict("; ".join(each.error for each in found) or "judge: no model was named")
        value = sum(each.value for each in readable) / len(readable)
        texts = tuple(text for each in found for text in each.texts)
        return Verdict(value, texts, readable[0].values, sum(each.unreadable for each in found))

    async def score(self, model: str, content: str | Sequence[Mapping[str, Any]]) -> Verdict:
        """Ask a classifier of the run by its name for the score of a text or of chat messages.

        Raises:
            NoVerdict: the content is too long, or the classifier cannot be asked.
        """
        verdict = await self._host.ask_model(self, model, content)
        if verdict.error:
            raise NoVerdict(verdict.error)
        return verdict


_LONGEST_S = 1e6
"""Most seconds that a tool may be given, since a timer takes no infinite number."""
