"""Chat in an episode: the model's template writes the prompt, then only what it adds to what stands there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlworker.data.rows import render_messages

Piece = str | tuple[int, ...]
"""Text that is yet to be encoded, or ids that were sampled and stay as they are."""


@dataclass(frozen=True)
class Addition:
    """Pieces that messages add to a sequence, or a further sequence that they begin.

    Attributes:
        pieces: to append in order; where ``is_fork``, the whole context of a further sequence.
        is_fork: the template has rewritten or dropped what stood there before.
    """

    pieces: tuple[Piece, ...]
    is_fork: bool = False


class Chat:
    """The messages of one episode, and what the template has made of them.

    What was sampled is decoded, to see what the template makes of it, and never encoded again. White space that a
    template trims or puts around it is no rewriting: ids that were sampled stand as they are.

    Args:
        messages: of the prompt. tools: JSON schemas, or functions with types and a docstring, as transformers takes.
        end_token_ids: each ends a turn of the model; the template writes one too.

    Attributes:
        text: the prompt as the template writes it, and later all that it would have written up to the last message.
    """

    def __init__(
        self, tokenizer: Any, messages: Sequence[Mapping], tools: Sequence = (), end_token_ids: Sequence[int] = ()
    ):
        self.tokenizer, self.tools, self.end_token_ids = tokenizer, tools, end_token_ids
        self.messages = [dict(message) for message in messages]
        self.text = self._render()
        self._turn: list[Piece] = []  # what was written since
        self._sampled: list[tuple[int, ...]] = []

    def note(self, piece: Piece) -> None:
        """Take note of what was appended to the sequence: sampled ids, or text that is no message."""
        self._turn.append(piece)
        if not isinstance(piece, str):
            self._sampled.append(piece)

    def add(self, messages: Sequence[Mapping]) -> Addition:
        """Add messages after what was sampled, and the place where the model goes on.

        Raises:
            jinja2.TemplateError: the template refuses them.
        """
        content, end = self._read_turn()
        if self._turn:
            self.messages.append({"role": "assistant", "content": content})
        self.messages += [dict(message) for message in messages]
        before, self.text, self._turn = self.text + content, self._render(), []
        remainder = _find_remainder(self.text, before)
        if remainder is None:
            return Addition(tuple(self._reuse_sampled()), is_fork=True)
        return Addition((_cut_end(remainder, end),))

    def _render(self) -> str:
        return render_messages(self.messages, self.tokenizer, self.tools)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _read_turn(self) -> tuple[str, str]:
        """Return the text of the model's turn, and apart from it the token that ended it."""
        pieces, end = self._turn, ""
        if pieces and not isinstance(last := pieces[-1], str) and last and last[-1] in self.end_token_ids:
            pieces, end = [*pieces[:-1], last[:-1]], self._decode(last[-1:])
        return "".join(piece if isinstance(piece, str) else self._decode(piece) for piece in pieces), end

    def _reuse_sampled(self) -> list[Piece]:
        """Cut the whole text into pieces, with the ids of whatever sampled text the template has left in it."""
        pieces, place = [], 0
        for ids in self._sampled:
            while ids and (ids[-1] in self.end_token_ids or self._decode(ids[-1:]).isspace()):
                ids = ids[:-1]  # which the template writes itself, or trims
            start, first = self._find_tail(ids, place)
            if start < len(ids):
                pieces += [self.text[place:first], ids[start:]]
                place = first + len(self._decode(ids[start:]))
        return [piece for piece in [*pieces, self.text[place:]] if piece]

    def _find_tail(self, ids: tuple[int, ...], place: int) -> tuple[int, int]:
        """Find the longest tail of sampled ids that stands in the text past a place: where it starts, in both.

        A template that drops thinking leaves the tail. Where a longer one stands, so does every shorter one, so that
        halving finds it; a tail that begins within a character does not, which costs a few ids and no text.
        """
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self.text.find(self._decode(ids[middle:]), place) >= 0:
                high = middle
            else:
                low = middle + 1
        return low, self.text.find(self._decode(ids[low:]), place)


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


def _cut_end(remainder: str, end: str) -> str:
    """Leave out the end of a turn where it was sampled already."""
    stripped = remainder.lstrip()
    return stripped[len(end) :] if end and stripped.startswith(end) else remainder
