"""The tools of a real MCP server, started as a program, are called by a model through an episode."""

import json
import sys

import pytest
from support.environments.agents import ASK, make_chat_row, run, tell_chat

pytestmark = [pytest.mark.large, pytest.mark.timeout(120)]
SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no disk")

server.run("stdio")
'''


def test_tools_of_a_server_are_shown_called_and_answered(tmp_path, monkeypatch):
    from support.environments import agents

    path, schemas = tmp_path / "server.py", []
    path.write_text(SERVER)
    calls = [{"name": "add", "arguments": {"a": 40, "b": 2}}, {"name": "fail", "arguments": {}}]

    async def environment(policy, row):
        from mcp import StdioServerParameters

        from rlworker import Episode, answer_calls
        from rlworker.environments.adapters.mcp import connect_mcp

        async with connect_mcp(StdioServerParameters(command=sys.executable, args=[str(path)])) as tools:
            schemas.extend(tools.schemas)
            monkeypatch.setattr(agents, "TOOL", None)
            episode = Episode(row, [ASK], tools=tools.schemas, tool_parser="hermes")
            for _ in calls:
                episode.observe(await answer_calls(policy, await policy.sample(episode), tools.functions))
            await policy.sample(episode)
        return episode

    def say(prompt, number):
        return f"<tool_call>{json.dumps(calls[number])}</tool_call>" if number < len(calls) else "ok"

    monkeypatch.setattr(agents.ToolEngines, "parse_tools", parse_any)
    (record,) = run(environment, [make_chat_row()], say)
    assert record.failure is None and record.turns == 3
    (written,) = tell_chat(record)
    assert '"description": "Add two whole numbers."' in written[0][1] and '"required": ["a", "b"]' in written[0][1]
    assert "<tool_response>\n42\n</tool_response>" in written[2][1]
    assert "error: " in written[4][1] and "McpError" in written[4][1]
    assert [schema["function"]["name"] for schema in schemas] == ["add", "fail"]


def parse_any(self, texts, parser, tools):
    """Read the one call of each text, of any tool."""
    from engines.vllm.tools import ToolCalls

    found = [json.loads(text.split(">")[1].split("<")[0]) if "<tool_call>" in text else None for text in texts]
    calls = [((call["name"], json.dumps(call["arguments"])),) if call else () for call in found]
    return [ToolCalls("", each) for each in calls]
