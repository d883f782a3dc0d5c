"""Offer the tools of an MCP server to the model (Model Context Protocol, package ``mcp`` 2)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


class McpError(Exception):
    """An MCP server answered a call by an error. ``answer_calls`` tells it to the model."""


@dataclass(frozen=True)
class McpTools:
    """Holds the tools of a server: schemas as ``Episode(tools=...)`` takes them, and functions by the name of each tool
    as ``answer_calls`` takes them."""

    schemas: list[dict[str, Any]]
    functions: dict[str, Callable[..., Awaitable[str]]]


@asynccontextmanager
async def connect_mcp(server: Any) -> AsyncIterator[McpTools]:
    """Connect to an MCP server, and give its tools while the context lasts::

        async with connect_mcp(StdioServerParameters(command="my-server")) as tools:
            episode = Episode(row, tools=tools.schemas, tool_parser="hermes")
            sample = await policy.sample(episode)
            episode.observe(await answer_calls(policy, sample, tools.functions))

    Args:
        server: an address, a ``StdioServerParameters``, or whatever else ``mcp.Client`` takes.
    """
    from mcp import Client

    async with Client(server) as client:
        page = await client.list_tools()
        listed = [*page.tools]
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            listed += page.tools

        def bind(name: str) -> Callable[..., Awaitable[str]]:
            async def call(**arguments: Any) -> str:
                result = await client.call_tool(name, arguments)
                text = "\n".join(part.text for part in result.content if part.type == "text")
                if result.is_error:
                    raise McpError(text)
                return text

            return call

        yield McpTools([_describe(tool) for tool in listed], {tool.name: bind(tool.name) for tool in listed})


def _describe(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
