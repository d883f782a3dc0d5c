"""Agents of the ``openai`` client share this: a few clients for all episodes of a process, and a loop over tools."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any

import httpx
from openai import AsyncOpenAI

from rlworker.environments.policy import Endpoint

Tools = Mapping[str, Callable[..., Awaitable[str]]]
"""Name of a tool -> the function that a call of the model is answered by."""


_CLIENTS, _EPISODES = 32, count()
"""Clients of a process, and the episodes that have one. A client looks through all of its connections at each request,
so that with one for a thousand episodes most of a step goes there."""


@cache
def _make_client(number: int) -> AsyncOpenAI:
    # As many connections as there are episodes, or those that wait for one would hold up a round.
    http: Any = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None)
    return AsyncOpenAI(base_url="http://none", api_key="-", http_client=http)


def connect(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a client of an episode's endpoint; episodes share connections."""
    return _make_client(next(_EPISODES) % _CLIENTS).with_options(base_url=endpoint.base_url)


async def play_with_tools(
    client: AsyncOpenAI, messages: Sequence[Mapping], schemas: Sequence[Mapping], tools: Tools, turns: int
) -> str:
    """Ask the model until it calls no tool, and return its last text; empty after ``turns`` turns with calls.

    Args:
        messages: the question. schemas: of the tools, as the model is shown them. tools: answer its calls.
    """
    history: list[Any] = [*messages]
    for _ in range(turns):
        reply = await client.chat.completions.create(model="policy", messages=history, tools=[*schemas])  # pyright: ignore[reportArgumentType]  plain dictionaries
        said = reply.choices[0].message
        history.append(said.model_dump(exclude_none=True))
        text = said.content or ""
        if not said.tool_calls and "<tool_call>" not in text:
            return text
        calls: list[Any] = [*(said.tool_calls or ())]
        for call in calls:
            history.append({"role": "tool", "tool_call_id": call.id, "content": await _answer(call.function, tools)})
        if not calls:
            history.append({"role": "tool", "content": "error: the call cannot be read"})
    return ""


async def _answer(function: Any, tools: Tools) -> str:
    try:
        return await tools[function.name](**json.loads(function.arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
