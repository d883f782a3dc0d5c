"""Names of vLLM's parsers of tool calls, read from its source."""

import pytest

from engines.vllm.tools import check_tool_parser, list_tool_parsers


def test_a_parser_is_known_by_its_name_before_vllm_is_imported():
    assert {"hermes", "pythonic", "qwen3_xml", "llama3_json"} <= list_tool_parsers()
    check_tool_parser("hermes")
    with pytest.raises(ValueError, match=r"^tools: vLLM has no parser 'herms'; did you mean 'hermes'\?$"):
        check_tool_parser("herms")
    with pytest.raises(ValueError, match=r"^tools: vLLM has no parser 'zzz'; it has .*hermes, "):
        check_tool_parser("zzz")
