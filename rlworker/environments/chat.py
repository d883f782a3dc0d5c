"""Chat in an episode: the model's template writes the prompt, and later only the text that new messages add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlworker.data.chat.messages import check_messages
from rlworker.data.chat.templates import is_begun, reads_field, render_messages
from rlworker.data.chat.turns import join_messages
from rlworker.data.encoding import decode_after
from rlworker.environments.record import ToolCall, name_call

ChatPart = str | tuple[int, ...]
"""Text that has yet to be encoded, or sampled ids, which are kept as they are."""


@dataclass(frozen=True)
class Addition:
    """The parts that new messages append to a sequence, or the new sequence that they begin.

    Attributes:
        parts: texts and ids to append in order; with ``is_fork``, the whole context of a new sequence.
        is_fork: whether the template has rewritten or dropped earlier text.
    """

    parts: tuple[ChatPart, ...]
    is_fork: bool = False


class Chat:
    """The messages of one episode, and the text that the chat template makes of them.

    Sampled ids are decoded to compare them with the template's text, and never encoded again. White space that a
    template trims or adds around them is no rewriting: sampled ids are kept as they are. Nor is a tool call that the
    template spells in another way than the model, such as with the call's id.

    A template that reads ``tool_calls`` is given the model's calls as such, with their ids, and the ids with the
    results that have none. If it refuses them, as Llama's does two calls in a turn, it is given their text.

    Args:
        tokenizer: the model's tokenizer, with the chat template.
        messages: messages of the prompt.
        tools: JSON schemas, or functions of which transformers makes schemas: with types, and a docstring that
            describes each argument under ``Args:``.
        end_token_ids: ids that each end a turn of the model; the template writes one of them too.
        sampled: number of a message of the prompt -> the ids whose text it is, sampled in an earlier sequence.

    Raises:
        ValueError: a message has no role, or content that is neither text nor parts.

    Attributes:
        text: the template's text of all messages so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping],
        tools: Sequence = (),
        end_token_ids: Sequence[int] = (),
        sampled: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ):
        self.tokenizer, self.tools, self.end_token_ids = tokenizer, tools, end_token_ids
        check_messages(messages, "Episode")
        self.messages = [dict(message) for message in messages]
        self.text = self._render(self.messages)
        self._turn: list[ChatPart] = []  # what was written since
        self._calls: Sequence[ToolCall] = ()  # in the last sample of it, which says `_content` beside them
        self._content = ""
        self._turns = 0  # number of samples so far
        self._joined: set[int] = set()  # numbers of messages of which a part alone was sampled
        self._sampled = [(number, tuple(ids)) for number, ids in sorted(sampled.items())]  # of each, its message

    def note(self, part: ChatPart, calls: Sequence[ToolCall] = (), content: str = "") -> None:
        """Record a part that was appended to the sequence: sampled ids, or text that is not a message.

        Args:
            calls: the tool calls in sampled ids. content: the text beside them.
        """
        if not isinstance(part, str):
            number = len(self.messages)
            if is_begun(self.messages):  # the sample goes on with the last message
                number -= 1
                self._joined.add(number)
            self._sampled.append((number, part))
            self._calls, self._turns = calls, self._turns + 1
            self._content = self._read_turn()[0] + content if calls else ""
        self._turn.append(part)

    def add(self, messages: Sequence[Mapping]) -> Addition:
        """Add messages after the last sample, and return the parts to append, up to where the model continues.

        Raises:
            ValueError: a message has no role, or content that is neither text nor parts.
            jinja2.TemplateError: the template refuses the messages.
        """
        check_messages(messages, "observe")
        content, end = self._read_turn()
        results = self._name_results(messages)
        earlier = self._write_turn(content, bool(self._calls) and reads_field(self.tokenizer, "tool_calls"))
        has_calls = bool(earlier) and bool(earlier[-1].get("tool_calls"))
        try:
            text = self._render([*earlier, *results])
        except Exception:  # such as that it takes one call a turn
            if not has_calls:
                raise
            earlier, has_calls = self._write_turn(content, has_calls=False), False
            text = self._render([*earlier, *results])
        remainder = _find_remainder(text, self.text + content)
        if remainder is None and has_calls:
            remainder = self._find_behind_calls(text, earlier)
        self.messages, self.text, self._turn, self._calls = [*earlier, *results], text, [], ()
        if remainder is None:
            return Addition(self.cut(), is_fork=True)
        stripped = remainder.lstrip()
        if end and stripped.startswith(end):  # which was sampled already
            remainder = stripped[len(end) :]
        return Addition((remainder,))

    def _write_turn(self, content: str, has_calls: bool) -> list[dict]:
        """Return the messages up to and with the model's turn, if it has said something.

        Args:
            content: its text. has_calls: whether its tool calls stand apart from the text.
        """
        if not self._turn:
            return self.messages
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if has_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in self._calls]
            calls = zip(self._calls, functions, strict=True)
            turn["content"] = self._content
            turn["tool_calls"] = [{"id": call.id, "type": "function", "function": each} for call, each in calls]
        if is_begun(self.messages):
            return [*self.messages[:-1], dict(join_messages(self.messages[-1], turn))]
        return [*self.messages, turn]

    def _name_results(self, messages: Sequence[Mapping]) -> list[dict]:
        """Return messages in which the results of tools have the ids of the calls that they answer."""
        ids = [call.id for call in self._calls]
        if not ids and reads_field(
            self.tokenizer, "tool_call_id"
        ):  # a call that could not be read has no id of its own
            ids = [name_call(max(self._turns - 1, 0), 0)]
        named = []
        results = 0
        for message in messages:
            message = dict(message)
            if message["role"] == "tool":
                if ids and not message.get("tool_call_id"):
                    message["tool_call_id"] = ids[min(results, len(ids) - 1)]
                results += 1
            named.append(message)
        return named

    def _find_behind_calls(self, text: str, messages: Sequence[Mapping]) -> str | None:
        """Find what follows the turn that ends ``messages`` in ``text``; None where the template has rewritten it or
        what stands before it."""
        closed = render_messages(messages, self.tokenizer, self.tools, "closed").rstrip()
        if _find_remainder(closed, self.text) is None:
            return None
        return _find_remainder(text, self._cut_end(closed))

    def _cut_end(self, closed: str) -> str:
        """Cut the token that ends a turn off the text of closed messages."""
        ends = (self._decode([token]) for token in self.end_token_ids)
        end = next((end for end in ends if end and closed.endswith(end)), "")
        return closed[: len(closed) - len(end)]

    def _render(self, messages: Sequence[Mapping]) -> str:
        return render_messages(messages, self.tokenizer, self.tools)

    def _decode(self, ids: Sequence[int], within: bool = False) -> str:
        """Decode ids as a text of their own, or as they stand ``within`` one, with a space that begins them."""
        if within and ids:
            return decode_after(self.tokenizer, ids[0], ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _read_turn(self) -> tuple[str, str]:
        """Return the text of the model's turn, and apart from it the token that ended it."""
        parts, end = self._turn, ""
        if parts and not isinstance(last := parts[-1], str) and last and last[-1] in self.end_token_ids:
            parts, end = [*parts[:-1], last[:-1]], self._decode(last[-1:])
        texts = [p if isinstance(p, str) else self._decode(p, within=place > 0) for place, p in enumerate(parts)]
        return "".join(texts), end

    def cut(self) -> tuple[ChatPart, ...]:
        """Cut the whole text into parts, with the ids of sampled text that the template has left in it."""
        parts, place, start, last = [], 0, 0, -1
        for number, ids in self._sampled:
            if number != last:  # behind the messages before it, which may say the same
                before, last = self._render(self.messages[:number]) if number else "", number
                start = max(place, len(before) if self.text.startswith(before) else 0)
            while ids and (ids[-1] in self.end_token_ids or self._decode(ids[-1:], within=True).isspace()):
                ids = ids[:-1]  # which the template writes itself, or trims
            cut = self._find_tail(ids, start)
            if cut and (span := self._locate_calls(number, start)):
                parts += [self.text[place : span[0]], ids]
                place = start = span[1]
            elif cut < len(ids):
                first, end = self._locate(ids[cut:], start)
                parts += [self.text[place:first], ids[cut:]]
                place = start = end
        return tuple(part for part in [*parts, self.text[place:]] if part)

    def _locate_calls(self, number: int, place: int) -> tuple[int, int] | None:
        """Find where the sampled message of a number starts and ends in the text past a place, its end token aside.

        None unless it has tool calls, which a template may spell in another way than the model, and stands there as the
        template first wrote it.
        """
        message = self.messages[number] if number < len(self.messages) else {}
        if not message.get("tool_calls") or number in self._joined:
            return None
        head = self._render(self.messages[:number]) if number else ""
        whole = render_messages(self.messages[: number + 1], self.tokenizer, self.tools, "closed")
        written = self._cut_end(whole.rstrip()).removeprefix(head)
        first = self.text.find(written, place)
        return None if first < 0 else (first, first + len(written))

    def _find_tail(self, ids: tuple[int, ...], place: int) -> int:
        """Find where the longest tail of sampled ids starts that stands in the text past a place.

        A template that drops thinking leaves the tail. Where a longer one stands, so does every shorter one, so that
        halving finds it; a tail that begins within a character does not, which costs a few ids and no text.
        """
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self._locate(ids[middle:], place)[0] >= 0:
                high = middle
            else:
                low = middle + 1
        return low

    def _locate(self, ids: tuple[int, ...], place: int) -> tuple[int, int]:
        """Find where ids start and end in the text past a place; -1 where they do not stand there. A space that begins
        them is theirs, unless the template has trimmed it."""
        for within in (True, False):
            text = self._decode(ids, within)
            if (first := self.text.find(text, place)) >= 0:
                return first, first + len(text)
        return -1, -1


def _find_remainder(text: str, before: str) -> str | None:
    """Find what follows ``before`` in ``text``; None where it does not begin so, white space aside."""
    if text.startswith(before):
        return text[len(before) :]
    place = 0
    for letter in before:
        if letter.isspace():
            continue
        while text[place : place + 1].isspace():
            place += 1
        if text[place : place + 1] != letter:
            return None
        place += 1
    return text[place:].lstrip() if before[-1:].isspace() else text[place:]
