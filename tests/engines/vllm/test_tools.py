"""Names of vLLM's parsers of tool calls, read from its source."""

import json
import mmap
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.vllm.processes import unlink_shared_memory
from engines.vllm.tools import check_tool_parser, check_tools, find_bare_call, list_tool_parsers, read_calls


def test_a_parser_is_known_by_its_name_before_vllm_is_imported():
    assert {"hermes", "pythonic", "qwen3_xml", "llama3_json"} <= list_tool_parsers()
    check_tool_parser("hermes")
    with pytest.raises(ValueError, match=r"^tools: vLLM has no parser 'herms'; did you mean 'hermes'\?$"):
        check_tool_parser("herms")
    with pytest.raises(ValueError, match=r"^tools: vLLM has no parser 'zzz'; it has .*hermes, "):
        check_tool_parser("zzz")


ADD = '{"name": "add", "arguments": {"a": {"b": 1}}}'


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ADD, "add"),
        (f"I add them.\n```json\n{ADD}\n```", "add"),
        (f"```json\n{ADD.replace('add', 'divide')}\n```", "divide"),
        (f"[{ADD.replace('add', 'divide')}]\n</tool_call>", "divide"),
        ('{"tool_calls": [{"type": "function", "function": {"name": "add", "parameters": "{}"}}]}', "add"),
        ('{"function": "add", "arguments": {}}', "add"),
        (f"it has {ADD.replace('add', 'divide')} in it", ""),
        ('{"name": "Ada", "age": 36}', ""),
        ('{"answer": {"name": "add"}}', ""),
        ("{" * 50 + ADD[:-1], ""),
        ('{"a":' * 100_000, ""),
        ("367", ""),
    ],
)
def test_the_json_of_a_call_is_found_without_the_marks_of_one(text, name):
    assert find_bare_call(text, {"add"}) == name


class Reader:
    """Stands for vLLM's parser of Hermes' calls."""

    def extract_tool_calls(self, text, request):
        found = [json.loads(each) for each in re.findall(r"<tool_call>(.*?)</tool_call>", text)]
        functions = [SimpleNamespace(name=call["name"], arguments=json.dumps(call["arguments"])) for call in found]
        calls = [SimpleNamespace(function=function) for function in functions]
        return SimpleNamespace(tool_calls=calls, content=text.partition("<tool_call>")[0] if calls else text)


DRAFT, CALL = "<tool_call>{broken</tool_call>", f"<tool_call>{ADD}</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"<think>Perhaps {DRAFT}?</think>It is 4.", f"<think>Perhaps {DRAFT}?</think>It is 4.", 0),
        (f"Perhaps {CALL}?</think>It is 4.", f"Perhaps {CALL}?</think>It is 4.", 0),
        (f"<think>Perhaps {ADD}?</think>\n\n{CALL}", f"<think>Perhaps {ADD}?</think>\n\n", 1),
        (
            f"<think>{DRAFT}</think>So <think>{CALL}</think>{CALL}{CALL}",
            f"<think>{DRAFT}</think>So <think>{CALL}</think>",
            2,
        ),
        (f"<think>Perhaps {CALL}", f"<think>Perhaps {CALL}", 0),
        ("<think>\n</think>", "<think>\n</think>", 0),
        (CALL.replace('"b": 1', '"b": "<think>"'), "", 1),
    ],
)
def test_what_is_drafted_in_thinking_is_no_call_and_no_error(text, content, count):
    request = SimpleNamespace(tools=[SimpleNamespace(function=SimpleNamespace(name="add"))])
    found = read_calls(Reader(), text, request)
    assert (found.content, len(found.calls), found.error) == (content, count, "")


def test_schemas_that_no_parser_takes_are_refused():
    schema = {"type": "object", "properties": {}}
    check_tools(
        [{"type": "function", "function": {"name": "add", "parameters": schema}}, {"function": {"name": "now"}}]
    )
    for tool in ({"name": "add", "parameters": schema}, {}, {"function": {"name": "add", "parameters": "none"}}):
        with pytest.raises(ValueError, match=r"tools: a parser takes \{\"type\": .* got \{"):
            check_tools([tool])
    with pytest.raises(ValueError, match=r"the schema of a tool must be JSON: .* set is not"):
        check_tools([{"function": {"name": "add", "parameters": {"enum": {1, 2}}}}])


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
@pytest.mark.parametrize(
    ("name", "is_vllms"),
    [
        ("vllm_dist_{}-tp:0-[0-1]-cpushm_0", True),  # 0.32
        ("{}-tp:0-[0-1]-cpushm_1", True),  # 0.23 and 0.26
        ("{}-another", False),
    ],
)
def test_buffers_of_collectives_lose_their_names(name, is_vllms):
    path = Path("/dev/shm", name.format(os.getpid()))
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
            unlink_shared_memory()
            mapped[0] = 1
        assert path.exists() != is_vllms
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
