"""Offer the tools of an MCP server to the model (Model Context Protocol, package ``mcp`` 2)."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlworker.environments.codec import get_codec
from rlworker.environments.tools.results import ToolContent


class McpError(Exception):
    """An MCP server answered a call by an error. ``answer_calls`` tells it to the model."""


@dataclass(frozen=True)
class McpTools:
    """Holds the tools of a server: schemas as ``Episode(tools=...)`` takes them, and functions by the name of each tool
    as ``answer_calls`` takes them."""

    schemas: list[dict[str, Any]]
    functions: dict[str, Callable[..., Awaitable[str | ToolContent]]]


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

        def bind(name: str) -> Callable[..., Awaitable[str | ToolContent]]:
            async def call(**arguments: Any) -> str | ToolContent:
                result = await client.call_tool(name, arguments)
                if result.is_error:
                    raise McpError(read_result(result, sees=False))
                return read_result(result, sees=get_codec().image_reader is not None)

            return call

        yield McpTools([_describe(tool) for tool in listed], {tool.name: bind(tool.name) for tool in listed})


def _describe(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def read_result(result: Any, sees: bool) -> str | ToolContent:
    """Read the result of a tool as the model is to see it.

    Text and text resources stand as they are, structured content as JSON where there is no text. Images are shown to a
    model that sees; of everything else a word names it.

    Args:
        result: ``mcp``'s ``CallToolResult``. sees: whether the model sees images.
    """
    parts = [_read_part(part, sees) for part in result.content]
    has_text = any(part.type == "text" and part.text for part in result.content)
    if result.structured_content is not None and not has_text:
        parts.insert(0, {"type": "text", "text": json.dumps(result.structured_content, ensure_ascii=False)})
    if any(part["type"] == "image" for part in parts):
        return ToolContent(tuple(parts))
    return "\n".join(part["text"] for part in parts) or "(no content)"


def _read_part(part: Any, sees: bool) -> dict[str, Any]:
    """Read a part of a result as a part of a chat message."""
    kind, resource = part.type, getattr(part, "resource", None)
    if kind == "text":
        return {"type": "text", "text": part.text}
    if text := getattr(resource, "text", ""):
        return {"type": "text", "text": text}
    media_type = (resource or part).mime_type or ""
    if sees and (kind == "image" or media_type.startswith("image/")) and kind != "resource_link":
        return {"type": "image", "image": base64.b64decode(resource.blob if resource else part.data)}
    names = [getattr(part, "name", ""), getattr(resource or part, "uri", ""), media_type]
    return {"type": "text", "text": f"[{kind}: {' '.join(str(name) for name in names if name)}]"}
