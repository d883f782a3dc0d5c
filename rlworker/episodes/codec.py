"""Text, chat messages and images to ids, as the run's rows are read; and sampled ids to text, never the other way."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from engines.batch.samples import Image
from rlworker.config.sections import DataConfig
from rlworker.data.images import ImageReader
from rlworker.episodes.chat import append_messages, list_row_messages, render_messages

if TYPE_CHECKING:
    from rlworker.data.rows import Row
    from rlworker.episodes.episode import Episode, Piece

Content = str | Sequence[int] | np.ndarray | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What the environment writes: text, ids, a chat message or several."""

_current: ContextVar[Codec] = ContextVar("codec")


@contextmanager
def using_codec(codec: Codec) -> Iterator[None]:
    """Let every episode that is made in this context be encoded by ``codec``."""
    token = _current.set(codec)
    try:
        yield
    finally:
        _current.reset(token)


def get_codec() -> Codec:
    """Return the codec of the play that runs.

    Raises:
        RuntimeError: no play runs.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "Episode: there is no tokenizer outside of a play; call it within using_codec(...)"
        ) from None


@dataclass(frozen=True)
class Codec:
    """Encodes what plays write and decodes what the model samples.

    Attributes:
        tokenizer: the model's. image_reader: of a model that sees images. data: how rows name their fields.
    """

    tokenizer: Any
    image_reader: ImageReader | None = None
    data: DataConfig = field(default_factory=DataConfig)

    def encode_text(self, text: str) -> list[int]:
        """Encode text, in which special tokens may be written out, without any of the tokenizer's own."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode sampled ids, without special tokens; ids that the tokenizer does not know are left out."""
        return self.tokenizer.decode(self._list_known(token_ids), skip_special_tokens=True)

    def decode_all(self, samples: Sequence[np.ndarray]) -> list[str]:
        """Decode several samples, each as ``decode`` does."""
        return self.tokenizer.batch_decode([self._list_known(ids) for ids in samples], skip_special_tokens=True)

    def _list_known(self, token_ids: Sequence[int] | np.ndarray) -> list[int]:
        ids, size = np.asarray(token_ids), self._vocabulary
        return ids.tolist() if not len(ids) or int(ids.max()) < size else ids[ids < size].tolist()

    @property
    def _vocabulary(self) -> int:
        return len(self.tokenizer)

    def encode_stops(self, stops: Sequence[int | str]) -> tuple[int, ...]:
        """Find the ids of tokens that end a sample.

        Raises:
            ValueError: a text is not one token.
        """
        ids = []
        for stop in stops:
            found = [int(stop)] if not isinstance(stop, str) else self.encode_text(stop)
            if len(found) != 1:
                raise ValueError(f"sample: stop {stop!r} is {len(found)} tokens, expected one; name a token or its id")
            ids += found
        return tuple(ids)

    def encode_observation(self, episode: Episode, content: Content, images: Sequence[Any]) -> tuple[Piece, bool]:
        """Encode what the environment wrote after what is there: the piece, and whether it takes the place of all that
        is there."""
        if messages := _list_messages(content):
            return append_messages(self, episode, messages, images)
        return self.encode_piece(content, images), False

    def encode_prompt(self, episode: Episode, content: Content | None, images: Sequence[Any]) -> Piece:
        """Encode the whole context that a sequence begins with; None is the row's own messages, with the episode's
        tools."""
        messages = list_row_messages(self, episode.row) if content is None else _list_messages(content)
        if messages:
            return render_messages(self, episode, messages, images)
        if content is None:
            raise ValueError("Episode: tools need a prompt of chat messages, the row's is text; give messages")
        return self.encode_piece(content, images)

    def encode_piece(self, content: str | Sequence[int] | np.ndarray, images: Sequence[Any]) -> Piece:
        """Encode text or ids, with image tokens as rows have them.

        Raises:
            ValueError: it has places for another number of images, or an image cannot be read.
        """
        from rlworker.episodes.episode import Piece

        read, place = self._read_images(images), "observe"
        if isinstance(content, str):
            text = self.image_reader.replace_markers(content, self.tokenizer) if self.image_reader else content
            ids: Sequence[int] | np.ndarray = self.encode_text(text)
        else:
            ids = content
        if self.image_reader:
            ids = self.image_reader.expand_ids(np.asarray(ids, dtype=np.int64).tolist(), read, place, self.data)
        return Piece(np.asarray(ids, dtype=np.int32), images=read)

    def _read_images(self, images: Sequence[Any]) -> tuple[Image, ...]:
        if not images:
            return ()
        if not self.image_reader:
            raise ValueError("observe: it has images, which this model cannot see; take a vision-language model")
        return self.image_reader.read_images([_name_image(image) for image in images], "observe", Path.cwd())


def _list_messages(content: Content) -> list[Mapping[str, Any]]:
    """List the chat messages that content has; none where it is text or ids."""
    if isinstance(content, Mapping):
        return [content]
    return list(content) if _is_chat(content) else []


def _is_chat(content: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(content, list | tuple) and bool(content) and isinstance(content[0], Mapping)


def _name_image(image: Any) -> Any:
    """Name an image as rows do: a path, or its bytes."""
    if isinstance(image, str | Path):
        return str(image)
    if isinstance(image, bytes):
        return {"bytes": image}
    if hasattr(image, "save"):  # Pillow's
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return {"bytes": buffer.getvalue()}
    raise ValueError(f"observe: an image must be a path, bytes or Pillow's, got {type(image).__name__}")
