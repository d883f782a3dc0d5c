"""Check chat messages of rows and environments, and render them by the model's chat template."""

import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from engines.validation import fits

MARKER, VIDEO_MARKER = "<image>", "<video>"
"""The markers that stand for an image and a video in the text of a prompt."""

TOOLS = "tools"
"""Field of a row with the JSON schemas of the tools that its messages may call."""
CHAT_FIELDS = ("prompt", "messages", "completion", TOOLS)
"""Fields of a row that hold messages or schemas; a prompt may have another name."""

MARKERS = {"image": MARKER, "video": VIDEO_MARKER}
"""Type of a message's part -> marker in the text."""

THINK = "<think>"
"""The text that opens the thinking in an answer."""

Ending = Literal["prompt", "new_turn", "closed"]
"""Where a rendered text ends.

``prompt``: where the model goes on, which is behind the text of an assistant's message that comes last, and else where
the model's turn begins. ``new_turn``: where the model's turn begins. ``closed``: behind the last message.
"""


def set_template_arguments(tokenizer: Any, arguments: Mapping[str, Any], section: str = "data") -> None:
    """Set variables that the tokenizer's chat template reads, such as ``enable_thinking``, for everything that it
    renders.

    Args:
        section: names the settings that have the variables, for messages.

    Raises:
        ValueError: there is no template, or it does not read a variable.
    """
    if not arguments:
        return
    if not isinstance(template := tokenizer.chat_template, str):
        raise ValueError(
            f"{section}: chat_template_args sets {', '.join(arguments)}, and the tokenizer has no chat template, or "
            "has several; leave it out"
        )
    words = {*re.findall(r"[A-Za-z_]\w*", template)}
    for name in arguments:
        if name not in words:
            close = difflib.get_close_matches(name, words, 1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise ValueError(
                f"{section}: chat_template_args has {name!r}, which the chat template does not read; {hint}"
            )
    # JSON's texts, numbers and truth values are Jinja's. A newline behind a statement is the statement's own.
    lines = [f"{{% set {name} = {json.dumps(value)} %}}\n" for name, value in arguments.items()]
    tokenizer.chat_template = "".join(lines) + template


def add_system(messages: Sequence[dict], system: str) -> tuple[dict, ...]:
    """Return the messages with a system message before them, unless they begin with one or ``system`` is empty."""
    if not system or messages[0]["role"] == "system":
        return tuple(messages)
    return {"role": "system", "content": system}, *messages


def drop_blank_keys(messages: Sequence[dict]) -> list[dict]:
    """Return messages whose parts lack the keys that are null: a template would take a part of text with ``"image":
    null`` for an image."""
    return [
        {**message, "content": [_drop_blanks(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _drop_blanks(part: Any) -> Any:
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part


def check_messages(messages: Sequence[Any], place: str) -> None:
    """Raise ValueError if a message has no role, or has content that a template cannot write.

    Content is text or parts. It may be missing in a message with ``tool_calls``. The error's text begins with ``place``
    and the number of the message.
    """
    for number, message in enumerate(messages):
        where = f"{place}, message {number} (from 0)"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where} must be {{"role": text, "content": text or parts}}, got {reprlib.repr(message)}')
        content = message.get("content")
        if flatten_content(content) is None and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f'{where}, of role {message["role"]!r}, must have content of text or parts, {{"type": "text", "text": '
                f'text}}, {{"type": "image"}} or {{"type": "video"}}, got {reprlib.repr(content)}; write a result of '
                "another type as text, such as by json.dumps"
            )


def list_parts(content: Any) -> list[dict]:
    """Return the parts of a message's content, or the messages of a prompt; an empty list if it is text."""
    return content if isinstance(content, list) else []


def has_images(prompt: Any) -> bool:
    """Tell whether a part of any message is an image or a video."""
    return any(part.get("type") in MARKERS for m in list_parts(prompt) for part in list_parts(m.get("content")))


def flatten_content(content: Any) -> str | None:
    """Return the ``content`` of a chat message as one text, with ``<image>`` and ``<video>`` for images and videos.

    ``content`` is text or a list of parts ``{"type": "text", "text": ...}``, ``{"type": "image"}`` or ``{"type":
    "video"}``. The result is None for any other content.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None
    texts: list[Any] = [MARKERS.get(str(part.get("type")), part.get("text")) for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def load_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the arguments of its tool calls as objects, which chat templates take; they are JSON in
    OpenAI's form.

    Raises:
        ValueError: arguments are text that is no JSON.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(function, Mapping) and isinstance(text := function.get("arguments"), str):
            try:
                function = {**function, "arguments": json.loads(text)}
            except ValueError:
                raise ValueError(f"the arguments of a tool call are no JSON: {text!r:.80}") from None
            call = {**call, "function": function} if "function" in call else function
        calls.append(call)
    return {**message, "tool_calls": calls}


def read_tools(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    """Return the JSON schemas of a row's ``tools``: a list, or the text of its JSON, as tables of text hold it.

    Raises:
        ValueError: the value is no list of objects; the error's text begins with ``place``.
    """
    if value is None or value == "":
        return ()
    tools: Any = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError):
            tools = value
    if tools is None:
        return ()
    if not fits(list[dict[str, Any]], tools):
        raise ValueError(
            f"{place} must be a list of JSON schemas, or the text of its JSON, got {reprlib.repr(value)}; rename the "
            "field where it has something else"
        )
    return tuple(tools)


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether messages end with text of the assistant, which the model goes on with."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(flatten_content(last.get("content"))) and not last.get("tool_calls")


def reads_field(tokenizer: Any, name: str) -> bool:
    """Tell whether the tokenizer's chat template, or one of several, looks for a field of a message."""
    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, Mapping) else [templates or ""]
    return any(re.search(rf"(?:\.|\[['\"]){name}\b", text) for text in texts)


def measure_common(first: str, second: str) -> int:
    """Return the number of letters with which both texts begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def render_messages(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence = (), ending: Ending = "prompt"
) -> str:
    """Render messages by the tokenizer's chat template; ``<image>`` and ``<video>`` stand for images and videos.

    A message with images is written by the template's own branch for parts, with what that writes around each image,
    such as a newline or a number. A template that takes text alone is given the markers.

    Args:
        tools: JSON schemas, or functions of which transformers makes schemas: with types, and a docstring that
            describes each argument under ``Args:``.
        ending: where the text ends.

    Raises:
        jinja2.TemplateError: the template refuses these messages.
        ValueError: arguments of a tool call are text that is no JSON, the template shows no tools, or it writes
            thinking of its own before the assistant's message that is to be continued.
    """
    if tools and isinstance(tokenizer.chat_template, str) and not re.search(r"\btools\b", tokenizer.chat_template):
        raise ValueError("the chat template does not read tools, so that the model would not see them; leave tools out")
    is_continued = ending == "prompt" and is_begun(messages)
    written = _find_part_tokens(tokenizer, str(tokenizer.chat_template)) if has_images(messages) else {}
    prepared = [_prepare_message(load_arguments(message), tokenizer, written) for message in messages]
    text = tokenizer.apply_chat_template(
        prepared,
        tools=[*tools] or None,
        tokenize=False,
        add_generation_prompt=ending != "closed" and not is_continued,
        continue_final_message=is_continued,
    )
    if is_continued:
        _check_continued(text, prepared, tokenizer, tools)
    for kind, tokens in written.items():
        text = text.replace(tokens, MARKERS[kind])
    return text


def _prepare_message(message: Mapping[str, Any], tokenizer: Any, written: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a message in the form that the chat template takes.

    Args:
        written: type of a part -> the text that the template writes for it.
    """
    if message.get("tool_calls") and message.get("content") is None:
        return {**message, "content": ""} if _writes_none(tokenizer, str(tokenizer.chat_template)) else message
    parts = list_parts(message.get("content"))
    kinds = MARKERS.keys() & {part.get("type") for part in parts}
    if parts and not (kinds and kinds <= written.keys()):
        return {**message, "content": flatten_content(parts)}
    return message


def _check_continued(text: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence) -> None:
    """Raise ValueError if the template opens thinking of its own before the begun thinking of the last message."""
    begun = flatten_content(messages[-1]["content"]) or ""
    if THINK not in begun:
        return
    before = ""
    if len(messages) > 1:
        before = tokenizer.apply_chat_template(messages[:-1], tools=[*tools] or None, tokenize=False)
    if text[measure_common(text, before) :].count(THINK) > begun.count(THINK):
        raise ValueError(
            f"it writes thinking of its own before the assistant's last message, {begun[:80]!r}, which has some too; "
            "close its thinking with </think>, or leave the message out"
        )


@lru_cache(maxsize=4)
def _writes_none(tokenizer: Any, template: str) -> bool:
    """Tell whether a chat template writes "None" for the content of a message that has tool calls alone.

    Args:
        template: the tokenizer's chat template, a key of the cache since it may be set anew.
    """
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "q"}, turn], tokenize=False)
    except Exception:  # it takes no tools, or content alone
        return False
    return "None" in text


@lru_cache(maxsize=4)  # of thousands of tokens it takes milliseconds
def _find_part_tokens(tokenizer: Any, template: str) -> dict[str, str]:
    """Find the special tokens that a chat template writes in the place of an image or a video.

    Args:
        template: the tokenizer's chat template, a key of the cache since it may be set anew.

    Returns:
        type of the part -> the tokens' text; without types that the template does not take.
    """
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    found = {}
    for kind in MARKERS:
        parts = [{"type": "text", "text": "\u00ab"}, {"type": kind}, {"type": "text", "text": "\u00bb"}]
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        except Exception:  # it takes text alone
            continue
        between = text.partition("\u00ab")[2].partition("\u00bb")[0]
        if (tokens := re.search(f"(?:{'|'.join(special)})+", between)) and tokens[0]:
            found[kind] = tokens[0]
    return found
