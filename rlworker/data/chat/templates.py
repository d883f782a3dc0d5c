"""Chat templates: messages are rendered as text, and a turn ends with a token."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from rlworker.data.chat.messages import MARKERS, flatten_content, has_images, list_parts

THINK = "<think>"
"""The text that opens the thinking in an answer."""
_ANSWER = "answer"
_CHAT = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER})

Ending = Literal["prompt", "new_turn", "closed"]
"""Where a rendered text ends.

``prompt``: where the model goes on, which is behind the text of an assistant's message that comes last, and else where
the model's turn begins. ``new_turn``: where the model's turn begins. ``closed``: behind the last message.
"""


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


def find_turn_end(tokenizer: Any) -> str:
    """Return the special token with which the chat template ends an answer, such as ``<|im_end|>``.

    The result is empty if it ends answers without a special token.
    """
    try:
        _, answer, behind = render_messages(_CHAT, tokenizer, ending="closed").rpartition(_ANSWER)
    except Exception:  # it may want tools, or know other roles
        return ""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return min((text for text in special if answer and text in behind), key=behind.find, default="")
