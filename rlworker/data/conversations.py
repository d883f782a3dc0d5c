"""Whole conversations to learn from: the assistant's messages are learned, all other tokens are context."""

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.batch.samples import Image
from engines.images.video import Video
from engines.models.vision.vision_spec import VisionSpec
from rlworker.config.sections import DataConfig
from rlworker.data.chat.messages import (
    MARKER,
    TOOLS,
    VIDEO_MARKER,
    add_system,
    drop_blank_keys,
    flatten_content,
    read_tools,
)
from rlworker.data.chat.templates import is_begun, render_messages
from rlworker.data.chat.turns import join_messages, write_turn
from rlworker.data.encoding import encode_after
from rlworker.data.formats import COMPLETION, check_type, find_format
from rlworker.data.images import ImageReader
from rlworker.data.rows import check_chat, check_rows
from rlworker.data.sources import iterate_rows

FIELD = "messages"
"""Field of a row with the messages of a conversation."""


@dataclass(frozen=True)
class Conversation:
    """A conversation of a row.

    Attributes:
        messages: the chat messages. tools: JSON schemas of the tools that the assistant may call.
        source: the whole row. where: place of the row, for messages.
        first: number of the first message that may be learned; messages before it are the prompt of a completion.
    """

    messages: tuple[dict, ...]
    tools: tuple[dict, ...]
    source: dict
    where: str
    first: int = 0


@dataclass(frozen=True)
class Piece:
    """A piece of a conversation's text.

    Attributes:
        text: the text.
        is_said: whether the assistant says it, so that it is learned.
        is_open: whether it lacks the token that ends the assistant's turn.
    """

    text: str
    is_said: bool = False
    is_open: bool = False


def has_conversations(path: str, data: DataConfig) -> bool:
    """Tell by the first row at ``path`` whether the rows are conversations.

    They are if they have ``messages`` and no prompt, messages as a prompt and no answer, or messages as a completion.
    """
    source: dict = next((source for _, source in iterate_rows(path, data.prompt_field)), {})
    prompt, answer = source.get(data.prompt_field), source.get(data.answer_field)
    if prompt is None:
        return source.get(FIELD) is not None
    kind = find_format(source, data)
    if kind == "trl":
        return isinstance(source.get(COMPLETION), list)
    return kind == "own" and isinstance(prompt, list) and answer is None


def iterate_conversations(path: str, data: DataConfig) -> Iterator[Conversation]:
    """Yield the conversations at ``path``, with their fields checked.

    Raises:
        ValueError: a conversation is broken; the message has place, row and field.
    """
    kind = None
    for where, source in iterate_rows(path, data.prompt_field):
        kind = kind or find_format(source, data)
        fields = [data.prompt_field if source.get(data.prompt_field) is not None else FIELD]
        if kind == "trl":
            check_type(where, source)
            fields += [COMPLETION] if fields != [FIELD] else []
        parts = [_read_messages(f'{where}: field "{field}"', source.get(field), data) for field in fields]
        if not any(message["role"] == "assistant" for message in parts[-1]):
            raise ValueError(
                f'{where}: field "{fields[-1]}" has no message of the assistant, so that nothing is learned; leave the '
                "row out"
            )
        tools = read_tools(source.get(TOOLS), f'{where}: field "{TOOLS}"')
        messages = add_system([message for part in parts for message in part], data.system)
        first = len(messages) - len(parts[-1]) if len(parts) > 1 else 0
        if not first and messages[0]["role"] == "assistant":
            raise ValueError(
                f"{where}: the conversation begins with the assistant, so that there is no prompt before what is "
                "learned; put a message there, such as by --data.system"
            )
        yield Conversation(messages, tools, source, where, first)


def _read_messages(place: str, messages: Any, data: DataConfig) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{place} must be a list of messages, as in the first row, got {reprlib.repr(messages)}; keep rows of text "
            "in a file of their own"
        )
    messages = drop_blank_keys(messages)
    check_chat(messages, place, data)
    return messages


def check_examples(path: str, data: DataConfig) -> None:
    """Check the fields of every row at ``path``, conversations included, without a tokenizer. It is ``check_rows`` for
    SFT.

    Raises:
        ValueError: there are no rows, a row is broken, or a row has nothing to learn; the message has place, row and
            field.
    """
    if has_conversations(path, data):
        for _ in iterate_conversations(path, data):
            pass
        return
    check_rows(path, data)
    for where, source in iterate_rows(path, data.prompt_field) if data.format == "trl" else ():
        if source.get(COMPLETION) is None and source.get(data.answer_field) is None:
            raise ValueError(
                f'{where}: field "{COMPLETION}" is missing, the row has {", ".join(source)}; give the completion, '
                "which supervised training learns"
            )


def write_conversation(conversation: Conversation, tokenizer: Any, ends: Sequence[str]) -> list[list[Piece]]:
    """Render a conversation by the chat template, as one sequence of pieces or several sequences.

    Where the template rewrites earlier messages, for instance by dropping their thinking, a new sequence begins. Every
    message of the assistant is learned in one of the sequences. A completion goes on with the assistant's message that
    its prompt ends with.

    Args:
        ends: texts of the tokens that end the assistant's turn.

    Raises:
        jinja2.TemplateError: the template refuses these messages.
        ValueError: as of ``write_turn``.
    """
    tools, first = conversation.tools, conversation.first
    before = list(conversation.messages[:first])
    sequences: list[list[Piece]] = []
    written = ""
    for number, message in enumerate(conversation.messages[first:], first):
        if message["role"] == "assistant":
            continues = number == first and is_begun(before)
            turn = write_turn(before, message, tokenizer, ends, tools, continues)
            if not sequences or not turn.context.startswith(written):
                sequences.append([])
                written = ""
            _append_context(sequences[-1], turn.context[len(written) :], ends)
            sequences[-1].append(Piece(turn.said, is_said=True, is_open=not turn.has_end))
            written = turn.context + turn.said
            if continues:
                message = dict(join_messages(before.pop(), message))
        before.append(message)
    whole = render_messages(before, tokenizer, tools, "closed")
    if before[-1]["role"] == "assistant" and whole.startswith(written):
        _append_context(sequences[-1], whole[len(written) :], ends)
    return sequences


def _append_context(pieces: list[Piece], text: str, ends: Sequence[str]) -> None:
    """Append what is not learned, but for a token that ends the open turn before it: GLM's turns end with the role that
    speaks next."""
    if pieces and pieces[-1].is_open:
        end = next((end for end in ends if text.startswith(end)), "")
        if end:
            pieces[-1] = replace(pieces[-1], text=pieces[-1].text + end, is_open=False)
            text = text[len(end) :]
    pieces.append(Piece(text))


class ConversationEncoder:
    """Encodes conversations to token ids.

    Args:
        ends: ids that each end the assistant's turn; if the template writes none of them, the tokenizer's eos is added.
        image_reader: reader of a vision-language model; None for text.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], data: DataConfig, image_reader: ImageReader | None = None):
        self.tokenizer, self.data, self.image_reader = tokenizer, data, image_reader
        self.ends = tokenizer.convert_ids_to_tokens(list(ends))

    def encode(
        self, conversation: Conversation, images: tuple[Image, ...]
    ) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[Image, ...]]]:
        """Encode a conversation to one sequence or several.

        Returns:
            for each sequence its ids, the learned spans ``(first, end)``, and its images in the order of their tokens.

        Raises:
            ValueError: the template refuses the messages, the assistant shows an image, or the number of images differs
                from their places.
        """
        where = conversation.where
        if not self.tokenizer.chat_template:
            raise ValueError(f"{where} has messages, but the tokenizer has no chat template; give prompt and answer")
        for message in conversation.messages if self.image_reader else ():
            said = flatten_content(message.get("content")) or ""
            if message["role"] == "assistant" and (MARKER in said or VIDEO_MARKER in said):
                raise ValueError(
                    f"{where}: the assistant's message {said[:80]!r} has an image, which only messages of other roles "
                    "may have; remove it"
                )
        try:
            sequences = write_conversation(conversation, self.tokenizer, self.ends)
        except Exception as error:  # a template raises one kind for roles and orders, and others on values
            raise ValueError(f"{where}: the chat template refuses these messages: {error}") from None
        return [
            self._expand(self._encode_pieces(pieces), images, where, pieces is sequences[-1]) for pieces in sequences
        ]

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[tuple[list[int], bool]]:
        """Encode successive pieces: the ids of each, and whether they are learned."""
        encoded, last = [], None
        for piece in pieces:
            text = piece.text
            if self.image_reader and not piece.is_said:
                text = self.image_reader.replace_markers(text, self.tokenizer)
            ids = encode_after(self.tokenizer, last, text) + [self.tokenizer.eos_token_id] * piece.is_open
            encoded.append((ids, piece.is_said))
            last = ids[-1] if ids else last
        return encoded

    def _expand(
        self, pieces: Sequence[tuple[list[int], bool]], images: tuple[Image, ...], where: str, shows_all: bool
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[Image, ...]]:
        """Join pieces, with image tokens expanded in the context; returns as ``encode``."""
        whole, learned, shown, left = [], [], [], list(images)
        if shows_all and self.image_reader:
            seen = [token for ids, is_said in pieces if not is_said for token in ids]
            self.image_reader.check_places(seen, images, where, self.data)
        for ids, is_said in pieces:
            if self.image_reader and not is_said:
                own = _pick_images(ids, left, self.image_reader.vision)
                left = [image for image in left if all(image is not other for other in own)]
                ids, ordered = self.image_reader.expand_ids(ids, tuple(own), where, self.data)
                shown += ordered
            if is_said:
                learned.append((len(whole), len(whole) + len(ids)))
            whole += ids
        return tuple(whole), tuple(learned), tuple(shown)


def _pick_images(ids: Sequence[int], images: Sequence[Image], vision: VisionSpec) -> list[Image]:
    """Pick the first images and videos that ids have places for."""
    stills = [image for image in images if not isinstance(image, Video)]
    videos = [image for image in images if isinstance(image, Video)]
    count = 0 if vision.video_token is None else ids.count(vision.video_token)
    return [*stills[: ids.count(vision.image_token)], *videos[:count]]
