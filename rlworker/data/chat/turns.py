"""The model's turn in a chat: the text that the chat template writes for an answer."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlworker.data.chat.messages import flatten_content
from rlworker.data.chat.templates import THINK, is_begun, load_arguments, measure_common, render_messages

_CONTENT = "the content"
_THOUGHTS = {name: f"the field {name!r}" for name in ("reasoning_content", "reasoning", "thinking")}
"""Fields of a message in which templates look for its thinking -> name in messages."""
_PLAIN = {_CONTENT, *_THOUGHTS.values()}
"""Texts that a template writes once, and as they are."""
_TAGS = re.compile(r"(</?think>)")
_MARK = re.compile(r"QzxMark(\d+)w")
"""Text that no template and no row has: it stands for a text of an answer."""


@dataclass(frozen=True)
class Turn:
    """The model's turn, as the chat template writes it.

    Attributes:
        context: the text before what the model writes: the beginning that the prompt and the whole text share.
        said: what the model writes, up to and including the token that ends it.
        has_end: whether ``said`` ends with a token that ends the turn.
    """

    context: str
    said: str
    has_end: bool


def write_turn(
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tokenizer: Any,
    ends: Sequence[str],
    tools: Sequence = (),
    continues: bool = True,
) -> Turn:
    """Write the turn in which the model gives ``answer`` after ``messages``.

    What the model writes stands behind the longest beginning that is common to the prompt and to the template's text of
    all messages. So a tag that the template writes into both, such as ``<think>``, is context, and one that it writes
    into the whole text alone is learned. White space behind the token that ends the turn belongs to the next prompt.

    Args:
        messages: messages before the answer. answer: a message of the assistant.
        ends: texts of the tokens that end a sample.
        continues: whether the answer goes on with the assistant's message that comes last before it, if there is one.

    Raises:
        jinja2.TemplateError: the template refuses these messages.
        ValueError: the template writes the messages before the answer in another way when it follows, or a text of the
            answer is lost or written twice.
    """
    answer = load_arguments(answer)
    earlier, whole_answer, ending = list(messages), answer, "new_turn"
    if continues and is_begun(messages):
        earlier, whole_answer, ending = list(messages[:-1]), join_messages(messages[-1], answer), "prompt"
    prompt = render_messages(messages, tokenizer, tools, ending)
    closed = render_messages(earlier, tokenizer, tools, "closed") if earlier else ""
    whole = render_messages([*earlier, whole_answer], tokenizer, tools, "closed")

    # The answer must leave the messages before it as they are: a template may drop a system message there.
    start = measure_common(prompt, whole)
    opening = measure_common(prompt, closed)
    if start < opening:
        raise ValueError(
            "with the answer behind them it writes the messages before in another way, "
            f"{whole[start : start + 60]!r} in place of {prompt[start : start + 60]!r}; write a system message into "
            "the user's, or leave out what it changes"
        )
    written = whole[opening:]
    tail = _find_tail(earlier, whole_answer, tokenizer, tools, written)
    tail = tail if whole.endswith(tail) else written
    cuts = [tail.find(end) + len(end) for end in ends if end in tail]
    if not cuts:  # only a tool call has more behind its last text
        cuts = [len(tail.rstrip()) if answer.get("tool_calls") else 0]
    said = whole[start : len(whole) - len(tail) + min(cuts)]
    return Turn(whole[:start], said, has_end=any(end in tail for end in ends))


def join_messages(begun: Mapping[str, Any], rest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message that ``rest`` makes of the assistant's message that was begun."""
    texts = (flatten_content(message.get("content")) or "" for message in (begun, rest))
    return {**begun, **rest, "content": "".join(texts)}


def _find_tail(
    messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], tokenizer: Any, tools: Sequence, written: str
) -> str:
    """Find the text that the template writes behind the last text of an answer.

    It renders the answer with a mark in the place of each of its texts.

    Args:
        written: the template's text of the answer, as it is.

    Raises:
        ValueError: a text of the answer is not written, or is written twice.
    """
    marked, texts = _mark_texts(answer)
    whole = render_messages([*messages, marked], tokenizer, tools, "closed")
    places = [int(mark) for mark in _MARK.findall(whole)]
    letters = "".join(written.split())
    for number, (name, text) in enumerate(texts):
        count = places.count(number)
        # A template may cut a text by what stands in it; arguments may stand there as JSON spells them.
        is_cut = name in _PLAIN and "".join(text.split()) not in letters
        if count == 0 or is_cut:
            raise ValueError(
                f"it leaves out {name} of the assistant's message, which would not be learned; write thinking as this "
                "template does, such as by <think> and </think> in the content, or leave the text out"
            )
        if count > 1 and name in _PLAIN:
            raise ValueError(f"it writes {name} of the assistant's message twice; leave one of its fields out")
    content = flatten_content(answer.get("content")) or ""
    if written.count(THINK) > max(1, content.count(THINK)):
        raise ValueError(
            "it writes thinking of its own before that of the assistant's message, so that <think> would be learned "
            "twice; give the thinking once, as reasoning_content or closed by </think>"
        )
    if not places:
        return written
    *_, last = _MARK.finditer(whole)
    return whole[last.end() :]


def _mark_texts(answer: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return a message with a mark in the place of each text that the model writes, and name and text of each.

    The tags of thinking and the white space around a text stay, since templates look for them.
    """
    texts: list[tuple[str, str]] = []

    def mark(text: str, name: str) -> str:
        stripped = text.strip()
        if not stripped:
            return text
        texts.append((name, stripped))
        head, _, tail = text.partition(stripped)
        return f"{head}QzxMark{len(texts) - 1}w{tail}"

    marked = dict(answer)
    for field in _THOUGHTS:
        text = marked.get(field)
        if isinstance(text, str):
            marked[field] = mark(text, _THOUGHTS[field])
    content = flatten_content(answer.get("content"))
    if content is not None:
        pieces = [piece if _TAGS.fullmatch(piece) else mark(piece, _CONTENT) for piece in _TAGS.split(content)]
        marked["content"] = "".join(pieces)
    if answer.get("tool_calls"):
        marked["tool_calls"] = [_mark_call(call, mark) for call in answer["tool_calls"]]
    return marked, texts


def _mark_call(call: Mapping[str, Any], mark: Callable[[str, str], str]) -> Mapping[str, Any]:
    """Return a tool call with a mark in the place of each text of its arguments."""
    function = call.get("function", call)
    name = str(function.get("name", ""))

    def mark_values(value: Any) -> Any:
        if isinstance(value, str):
            return mark(value, f"an argument of the call of {name!r}")
        if isinstance(value, Mapping):
            return {key: mark_values(each) for key, each in value.items()}
        return [mark_values(each) for each in value] if isinstance(value, list) else value

    marked = {
        **function,
        "name": mark(name, f"the call of {name!r}"),
        "arguments": mark_values(function.get("arguments")),
    }
    return {**call, "function": marked} if "function" in call else marked
