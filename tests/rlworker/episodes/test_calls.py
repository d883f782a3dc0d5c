"""Messages that answer a model's calls of tools: whatever goes wrong is told to it."""

import asyncio

import numpy as np

from rlworker.episodes import Model, Sample, ToolFailure, answer_calls
from rlworker.episodes.model import ToolCall


def add(a: int, b: int = 1) -> int:
    return a + b


async def shout(text: str) -> str:
    return text.upper()


class Host:
    """Calls tools where it is, and notes which; one of them hangs."""

    def __init__(self):
        self.called = []

    async def call_tool(self, model, call, args, limit_s, memory_mb):
        self.called.append((call, args))
        if call is hang:
            raise ToolFailure("timeout", "no end after 2 s")
        return call(*args)

    class limits:
        tool_limit_s = 2.0


def hang() -> None: ...


def answer(*calls: ToolCall, error: str = "") -> tuple[list[str], Host]:
    host = Host()
    sample = Sample("", np.zeros(1, np.int32), True, calls, error)
    tools = {"add": add, "shout": shout, "hang": hang}
    messages = asyncio.run(answer_calls(Model(host, 0, (0,)), sample, tools))
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages], host


def test_each_call_has_an_answer_in_its_order():
    calls = ToolCall("add", {"b": 2, "a": 1}), ToolCall("shout", {"text": "ok"}), ToolCall("add", {"a": 1})
    contents, host = answer(*calls)
    assert contents == ["3", "OK", "2"]
    assert host.called == [(add, (1, 2)), (add, (1,))], "in a process of its own; an async one is not"


def test_no_call_has_no_answer():
    assert answer()[0] == []


def test_what_goes_wrong_is_told():
    calls = ToolCall("subtract", {}), ToolCall("add", {"c": 1}), ToolCall("hang", {})
    assert answer(*calls)[0] == [
        "error: there is no tool 'subtract', there are add, shout, hang",
        "error: missing a required argument: 'a'",
        "error: no end after 2 s",
    ]
    assert answer(error="JSONDecodeError: it ends")[0] == ["error: the call cannot be read: JSONDecodeError: it ends"]
