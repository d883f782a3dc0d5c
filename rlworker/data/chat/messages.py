"""Check chat messages of rows and environments."""

import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from engines.validation import fits

MARKER, VIDEO_MARKER = "<image>", "<video>"
"""The markers that stand for an image and a video in the text of a prompt."""

TOOLS = "tools"
"""Field of a row with the JSON schemas of the tools that its messages may call."""
CHAT_FIELDS = ("prompt", "messages", "completion", TOOLS)
"""Fields of a row that hold messages or schemas; a prompt may have another name."""

MARKERS = {"image": MARKER, "video": VIDEO_MARKER}
"""Type of a message's part -> marker in the text."""


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
