"""The model's turn in a chat: its answer as the template writes it, and the token that ends it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlworker.data.messages import flatten_content, render_messages

_ANSWER = "answer"
_CHAT = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER})


def find_turn_end(tokenizer: Any) -> str:
    """Find the special token with which the chat template ends an answer, like ``<|im_end|>``; empty where it ends
    none so, or there is no template."""
    if not tokenizer.chat_template:
        return ""
    try:
        _, answer, behind = render_messages(_CHAT, tokenizer, goes_on=False).rpartition(_ANSWER)
    except Exception:  # it may want tools, or know other roles
        return ""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return min((text for text in special if answer and text in behind), key=behind.find, default="")


def write_turn(
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tokenizer: Any,
    ends: Sequence[str],
    tools: Sequence = (),
) -> tuple[str, bool]:
    """Write the model's text behind the prompt of some messages for its answer, as the template has it.

    That is the answer with the template's text before it, up to the first of ``ends``: a newline behind that belongs
    to the next prompt. Where the template rewrites prompt or answer, as those do that drop thinking, the answer stands
    as it was given.

    Args:
        messages: before the answer. answer: a message of the assistant. ends: texts of the tokens that end a sample.

    Returns:
        the text, and whether it ends with one of ``ends``.

    Raises:
        jinja2.TemplateError: the template refuses these messages.
    """
    prompt, content = render_messages(messages, tokenizer, tools), flatten_content(answer.get("content")) or ""
    whole = render_messages([*messages, answer], tokenizer, tools, goes_on=False)
    for text in (content, content.strip()):
        place = whole.find(text, len(prompt)) if whole.startswith(prompt) else -1
        if place >= 0:
            behind = place + len(text)
            cuts = [whole.find(end, behind) + len(end) for end in ends if end in whole[behind:]]
            return whole[len(prompt) : min(cuts, default=behind)], bool(cuts)
    end = find_turn_end(tokenizer)
    return content + end, bool(end)
