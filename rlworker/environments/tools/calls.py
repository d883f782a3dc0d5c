"""Answer the tool calls that a model wrote."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from inspect import signature
from typing import Any

from rlworker.environments.policy import EpisodeLimit, Policy, ToolFailure
from rlworker.environments.record import Sample, ToolCall
from rlworker.environments.tools.results import spell_result, tell_model
from rlworker.environments.user_code import describe_error, is_async, name_function

Tool = Callable[..., Any] | Callable[..., Awaitable[Any]]


async def answer_calls(policy: Policy, sample: Sample, tools: Mapping[str, Tool]) -> list[dict]:
    """Run the tool calls of a sample one after another, and return a chat message for each result; empty without calls.

    Errors are told to the model in a message that begins with ``error:``, and are not raised: a call that cannot be
    read, an unknown tool, wrong arguments, a tool that raises, a process that fails. Where a tool failed, with its
    lines and paths, goes to the log of this process and not to the model.

    Args:
        policy: runs the tools. sample: the model's turn.
        tools: name of a tool -> function, called with the model's arguments. A function runs by ``Policy.tool`` in a
            separate process; an ``async`` function, or an object with an ``async __call__``, runs in the environment.
    """
    if sample.call_error:
        return [{"role": "tool", "content": f"error: the call cannot be read: {sample.call_error}"}]
    return [
        {"role": "tool", "name": call.name, "content": await _answer(policy, call, tools), "tool_call_id": call.id}
        for call in sample.calls
    ]


async def _answer(policy: Policy, call: ToolCall, tools: Mapping[str, Tool]) -> str | list[dict[str, Any]]:
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}, there are {', '.join(tools)}"
    tool = tools[call.name]
    try:
        places, names = _bind(tool, call.arguments)
    except TypeError as error:
        return f"error: {error}"
    try:
        if not is_async(tool):
            return _spell(tool, await policy.tool(tool, *places, keywords=names))
        return _spell(tool, await _call_within(tool, *places, **names))
    except ToolFailure as failure:
        logging.getLogger(__name__).info(f"tool {call.name} failed: {failure.message}")
        return tell_model(failure.message, call.arguments)


def _bind(tool: Tool, arguments: Mapping[str, Any]) -> tuple[list, dict[str, Any]]:
    """Split arguments by name into those that a tool takes by their places alone, and all others.

    Raises:
        TypeError: the tool does not take them.
    """
    places, names = [], dict(arguments)
    try:
        called = signature(tool, follow_wrapped=False)  # a wrapper may take other arguments
    except ValueError:  # a builtin that has none says itself what it does not take
        return places, names
    only = [each for each in called.parameters.values() if each.kind is each.POSITIONAL_ONLY]
    while only and only[-1].name not in names:
        only.pop()
    for each in only:
        places.append(names.pop(each.name, each.default))
        if places[-1] is each.empty:
            raise TypeError(f"missing a required argument: {each.name!r}")
    called.bind(*places, **names)
    return places, names


async def _call_within(tool: Callable[..., Any], /, *places: Any, **names: Any) -> Any:
    """Call an async tool in the environment; what it raises is its failure, but for the limits of the episode."""
    try:
        return await tool(*places, **names)
    except (EpisodeLimit, ToolFailure):
        raise
    except (Exception, SystemExit) as error:
        raise ToolFailure("raised", f"{name_function(tool)}: {describe_error(error)}") from error


def _spell(tool: Tool, result: Any) -> str | list[dict[str, Any]]:
    try:
        return spell_result(result)
    except Exception as error:
        raise ToolFailure("raised", f"{name_function(tool)}: what it returned is no text: {error!r}") from error
