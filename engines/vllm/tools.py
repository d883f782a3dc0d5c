"""Tool calls in sampled text, read by vLLM's parsers, which are loaded when the first text is read."""

from __future__ import annotations

import ast
import difflib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LIST = ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")
"""File and dictionary of vLLM that hold the names of its parsers (0.32)."""
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"
_AROUND = re.compile(r"```\w*|</?\w+>|[\s,\[\]]")
"""Text that may surround the JSON of a tool call: a fence, half of the marks, a list."""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls that a parser found in one text.

    Attributes:
        content: the text beside the calls.
        calls: for each call, the name of the tool and its arguments, the text of a JSON object.
        error: why a call cannot be read, in which case ``calls`` is ignored; empty if there is no error.
    """

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    error: str = ""


@cache
def list_tool_parsers() -> frozenset[str]:
    """Return the names of vLLM's parsers, from its source without importing it; empty if vLLM is not installed."""
    spec, (file, name) = find_spec("vllm"), _LIST
    for folder in (spec and spec.submodule_search_locations) or ():
        for line in ast.parse((Path(folder) / file).read_text(encoding="utf-8")).body:
            match line:
                case ast.Assign(targets=[ast.Name(id=found)], value=parsers) if found == name:
                    return frozenset(ast.literal_eval(parsers))
    return frozenset()


def check_tool_parser(parser: str) -> None:
    """Raise ValueError if vLLM has no parser of this name. Without vLLM in the process every name passes."""
    known = list_tool_parsers()
    if known and parser not in known:
        close = difflib.get_close_matches(parser, known, 1)
        advice = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(known))}"
        raise ValueError(f"tools: vLLM has no parser {parser!r}; {advice}")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the schemas of tools are not in the form that parsers take."""
    for tool in tools:
        match tool:
            case {"function": {"name": str(), "parameters": Mapping() | None}}:
                continue
            case {"function": {"name": str()} as function} if "parameters" not in function:
                continue
        raise ValueError(
            'tools: a parser takes {"type": "function", "function": {"name": text, "parameters": {...}}}, got '
            f"{tool!r:.200}"
        )
    try:
        json.dumps(tools)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tools: the schema of a tool must be JSON: {error}") from error


def parse_tool_calls(
    texts: Sequence[str], parser: str, tools: Sequence[Mapping[str, Any]], folder: str
) -> list[ToolCalls]:
    """Find the tool calls in each text. A call that cannot be read gives a result with an error, never an exception.

    Calls that a model drafts in its thinking are none: what stands before ``</think>``, or behind a ``<think>`` that
    is not closed, is text.

    Args:
        parser: vLLM's name of the parser. tools: schemas that the model was shown, with ``type`` and ``function``.
        folder: the model's folder, whose tokenizer the parser gets.

    Raises:
        ValueError: the parser is unknown, or cannot work with this tokenizer.
    """
    check_tool_parser(parser)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools)})
    make_reader: Any = ToolParserManager.get_tool_parser(parser)
    try:
        reader = make_reader(_load_tokenizer(folder), request.tools)
    except (RuntimeError, ValueError) as error:  # both are in use
        raise ValueError(f"tools: parser {parser!r} does not fit the tokenizer of {folder}: {error}") from error
    return [read_calls(reader, text, request) for text in texts]


@cache
def _load_tokenizer(folder: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def read_calls(reader: Any, text: str, request: Any) -> ToolCalls:
    """Find the tool calls in a text by a parser of vLLM's; ``request`` has the tools."""
    thought, answer = _split_thinking(text)
    if not answer:
        return ToolCalls(text)
    with _hearing_errors() as errors:
        try:
            found = reader.extract_tool_calls(answer, request)
        except Exception as error:  # a parser of vLLM's may raise anything on a model's text
            return ToolCalls(text, error=f"{type(error).__name__}: {error}")
    calls = tuple((call.function.name, call.function.arguments) for call in found.tool_calls)
    content = found.content or ""
    if not errors and not calls and content.strip() != answer.strip():
        errors.append("it begins like a call and holds none")
    if (
        not errors
        and not calls
        and (name := find_bare_call(answer, {tool.function.name for tool in request.tools or ()}))
    ):
        errors.append(f"the JSON of a call of {name!r} stands without the marks of a call")
    errors += [f"the arguments of {name} are no JSON object" for name, arguments in calls if not _is_object(arguments)]
    return ToolCalls(text, error=errors[0]) if errors else ToolCalls(thought + content, calls)


def _split_thinking(text: str) -> tuple[str, str]:
    """Split a text behind its thinking; a thought that is not closed leaves nothing behind it."""
    thought, end, answer = text.rpartition(_THOUGHT_ENDS)
    if answer.lstrip().startswith(_THOUGHT_BEGINS):
        return text, ""
    return thought + end, answer


def find_bare_call(text: str, tools: Collection[str]) -> str:
    """Return the name of the tool in a JSON tool call without the marks that parsers look for; empty if there is none.

    A call of one of ``tools`` counts anywhere in the text. A call of another tool counts only if the text has nothing
    else.
    """
    decoder, start = json.JSONDecoder(), -1
    while (start := text.find("{", start + 1)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except RecursionError:  # no call is nested so deep, and to look on would take long
            return ""
        except ValueError:
            continue
        name = _name_call(value)
        if name in tools or (name and not _AROUND.sub("", text[:start] + text[end:])):
            return name
    return ""


def _name_call(value: dict[str, Any]) -> str:
    """Name the tool that a JSON object calls; empty where it does not look like a call."""
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    name = value.get("name", inner)
    return name if isinstance(name, str) and {"arguments", "parameters"} & value.keys() else ""


@contextmanager
def _hearing_errors() -> Iterator[list[str]]:
    """Collect the errors that vLLM's parsers log, which is all that they report of a call that they cannot read."""
    errors: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if error is not None:
                errors.append(f"{type(error).__name__}: {error}")

    logger, listener = logging.getLogger("vllm.tool_parsers"), Listener(logging.ERROR)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(listener)
    try:
        yield errors
    finally:
        logger.removeHandler(listener)
        logger.propagate = before


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
