"""The nine forms of a conversation, as rows to learn from."""

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"first": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
_ASK = {"role": "user", "content": "What is 1 + 3?"}
_SAY = {"role": "assistant", "content": "It is 4."}


def _call(number: int) -> dict:
    arguments = {"first": number, "note": f"of sum {number}"}
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def _ask_tool(count: int) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [_call(number) for number in range(count)]}


FORMS: dict[str, dict] = {
    "thinking in the content": {
        "messages": [_ASK, {"role": "assistant", "content": "<think>\nOne and three.\n</think>\n\nIt is 4."}]
    },
    "`reasoning_content`": {"messages": [_ASK, _SAY | {"reasoning_content": "One and three."}]},
    "no thinking": {"messages": [_ASK, _SAY]},
    "a tool call": {"messages": [_ASK, _ask_tool(1)], "tools": [TOOL]},
    "two calls": {"messages": [_ASK, _ask_tool(2)], "tools": [TOOL]},
    "a result": {
        "messages": [_ASK, _ask_tool(1), {"role": "tool", "content": "4", "tool_call_id": "call00000"}, _SAY],
        "tools": [TOOL],
    },
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, _ASK, _SAY]},
    "two turns": {"messages": [_ASK, _SAY, {"role": "user", "content": "And 2 + 2?"}, _SAY | {"content": "4 again."}]},
    "an assistant's prefix": {
        "prompt": [_ASK, {"role": "assistant", "content": "It"}],
        "completion": [{"role": "assistant", "content": " is 4."}],
    },
}
"""The nine forms of a conversation, as rows."""
