"""Calls of tools that a model wrote, and the messages that answer them."""

from collections.abc import Awaitable, Callable, Mapping
from inspect import iscoroutinefunction, signature
from typing import Any

from rlworker.episodes.model import Model, Sample, ToolCall, ToolFailure

Tool = Callable[..., Any] | Callable[..., Awaitable[Any]]


async def answer_calls(model: Model, sample: Sample, tools: Mapping[str, Tool]) -> list[dict]:
    """Call the tools that a sample asks for, one after another, and write a message of each result; none of no call.

    What goes wrong is told to the model and is no error: a call that cannot be read, a tool that there is not, and
    arguments or a process that fail. Such a message begins with ``error:``.

    Args:
        tools: by name, each with arguments that can be given by their places. A function runs by ``Model.tool``, in a
            process of its own; an ``async`` one within the play.
    """
    if sample.call_error:
        return [{"role": "tool", "content": f"error: the call cannot be read: {sample.call_error}"}]
    return [{"role": "tool", "name": call.name, "content": await _answer(model, call, tools)} for call in sample.calls]


async def _answer(model: Model, call: ToolCall, tools: Mapping[str, Tool]) -> str:
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}, there are {', '.join(tools)}"
    tool = tools[call.name]
    try:
        arguments = signature(tool).bind(**call.arguments).args
    except TypeError as error:
        return f"error: {error}"
    try:
        return str(await (tool(*arguments) if iscoroutinefunction(tool) else model.tool(tool, *arguments)))
    except ToolFailure as failure:
        return f"error: {failure.message}"
