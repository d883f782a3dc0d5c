"""The model's turn in a chat: the text that the chat template writes for an answer, and the token that ends it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlworker.data.messages import flatten_content, render_messages

_ANSWER = "answer"
_CHAT = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER})


def find_turn_end(tokenizer: Any) -> str:
    """Return the special token with which the chat template ends an answer, such as ``<|im_end|>``.

    The result is empty if there is no template, or it ends answers without a special token.
    """
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
    """Return the text with which the model continues the rendered ``messages`` to give ``answer``.

    It is the answer with the template's text before it, up to and including the first of ``ends``; a newline after that
    belongs to the next prompt. Where the template rewrites prompt or answer, for instance by dropping thinking, the
    answer stays as given.

    Args:
        messages: messages before the answer. answer: a message of the assistant.
        ends: texts of the tokens that end a sample.

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
