"""The codec encodes an environment's text and images as the run's rows are encoded, and decodes sampled ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engines.batch.samples import Image
from rlworker.config.sections import DataConfig
from rlworker.data.encoding import ORDINARY, encode_after, encode_prompts
from rlworker.environments.record import Segment

if TYPE_CHECKING:  # a model of text alone loads nothing of images
    from rlworker.data.images import ImageReader

Content = str | Sequence[int] | np.ndarray | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Content that an environment writes: text, ids, a chat message or several chat messages."""
Stops = Sequence[int | str] | int | str
"""Tokens that end a sample: ids, or texts of one token each."""

_current: ContextVar[Codec] = ContextVar("codec")


@contextmanager
def using_codec(codec: Codec) -> Iterator[None]:
    """Make ``codec`` the codec of every episode that is made in this context."""
    token = _current.set(codec)
    try:
        yield
    finally:
        _current.reset(token)


def get_codec() -> Codec:
    """Return the codec of the environment that runs now.

    Raises:
        RuntimeError: no environment runs.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "Episode: it was made outside of an environment, where no tokenizer is set; make it inside the "
            "environment's function, or in a test inside `with using_codec(codec):`"
        ) from None


@dataclass(frozen=True)
class Codec:
    """Encodes observations and decodes samples.

    Attributes:
        tokenizer: the model's tokenizer.
        stop_token_ids: ids that each end a sample.
        image_reader: reads images; None for a model without vision.
        data: settings of the data, with the names of the rows' fields.
        vocab: number of ids of the model; 0 where it is not known.
        stop_texts: texts that each end a sample, and that ``read_samples`` leaves out.
    """

    tokenizer: Any
    stop_token_ids: tuple[int, ...] = ()
    image_reader: ImageReader | None = None
    data: DataConfig = field(default_factory=DataConfig)
    vocab: int = 0
    stop_texts: tuple[str, ...] = ()

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids without special tokens; ids that the tokenizer does not know are left out."""
        return self.decode_all([token_ids])[0]

    def decode_all(self, samples: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True) -> list[str]:
        """Decode several lists of ids to one text each; ids that the tokenizer does not know are left out.

        Args:
            skip_special: whether special tokens are left out.
        """
        if not samples:
            return []  # of which the tokenizer would make one text
        arrays, size = [np.asarray(ids) for ids in samples], len(self.tokenizer)
        if any(len(ids) for ids in arrays) and np.concatenate(arrays).max() >= size:
            arrays = [ids[ids < size] for ids in arrays]
        return self.tokenizer.batch_decode([ids.tolist() for ids in arrays], skip_special_tokens=skip_special)

    def read_samples(self, samples: Sequence[np.ndarray]) -> list[str]:
        """Decode samples for rewards: without special tokens, and cut before the stop text that ended each."""
        texts = self.decode_all(samples)
        if self.stop_texts:
            heads = self.decode_all([ids[:-1] for ids in samples])  # a stop text ends within the last token
            for place, (text, head) in enumerate(zip(texts, heads, strict=True)):
                found = [text.find(stop, max(0, len(head) - len(stop) + 1)) for stop in self.stop_texts]
                texts[place] = text[: min((start for start in found if start >= 0), default=len(text))]
        return texts

    def decode_samples(self, samples: Sequence[np.ndarray]) -> list[str]:
        """Decode samples for a parser of tool calls: with special tokens, except the stop token that ended each."""
        stops = self.stop_token_ids
        return self.decode_all([ids[:-1] if len(ids) and ids[-1] in stops else ids for ids in samples], False)

    def encode_stops(self, stops: Stops) -> tuple[int, ...]:
        """Return the ids of tokens that end a sample.

        Raises:
            ValueError: a text is not one token, or the model does not have an id.
        """
        ids = []
        for stop in [stops] if isinstance(stops, int | np.integer | str) else stops:
            token = self._encode_text(stop, ORDINARY) if isinstance(stop, str) else self._read_ids([stop], "sample")
            if len(token) != 1:
                raise ValueError(f"sample: stop {stop!r} is {len(token)} tokens, expected one; name a token or its id")
            ids += token
        return tuple(ids)

    def encode(
        self, parts: Sequence[Content], images: Sequence[Any], last: int | None = None, is_plain: bool = False
    ) -> Segment:
        """Encode a series of texts and ids to one segment, with image tokens where it has images.

        Args:
            parts: the texts and ids, in order.
            images: the images of the parts, in order.
            last: the id that stands before the parts; None where they begin a sequence.
            is_plain: whether the parts are one text that begins a sequence, so that the tokenizer's opening special
                tokens are added, as for rows of text.

        Raises:
            ValueError: the number of images does not match their places, an image cannot be read, or the model does not
                have an id.
        """
        read, ids = self._read_images(images), []
        for part in parts:
            before = ids[-1] if ids else last
            if isinstance(part, str):
                ids += self._encode_text(part, before, is_plain)
            else:
                ids += self._read_ids(part, "observe")
        if self.image_reader:
            ids, read = self.image_reader.expand_ids(ids, read, "observe", self.data)
        return Segment(np.array(ids, dtype=np.int32), images=read)

    def _encode_text(self, text: str, last: int | None, is_plain: bool = False) -> list[int]:
        """Encode text, in which special tokens and the markers of images may be written out, behind an id."""
        text = _mend_surrogates(text)
        if self.image_reader:
            text = self.image_reader.replace_markers(text, self.tokenizer)
        if is_plain:
            return encode_prompts(self.tokenizer, [text], [True])[0]
        return encode_after(self.tokenizer, last, text)

    def _read_ids(self, content: Any, where: str) -> list[int]:
        ids = np.asarray(content)
        if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0)):
            raise ValueError(f"{where}: expected text, ids, or messages of role and content, got {content!r:.80}")
        if self.vocab and len(ids) and ids.max() >= self.vocab:
            raise ValueError(f"{where}: got id {ids.max()}, expected an id of the model, 0 to {self.vocab - 1}")
        return ids.tolist()

    def _read_images(self, images: Sequence[Any]) -> tuple[Image, ...]:
        if not images:
            return ()
        if not self.image_reader:
            raise ValueError("observe: got images for a model without vision; leave images out, or train a VLM")
        return self.image_reader.read_shown(images, "observe", Path.cwd())


def list_messages(content: Content) -> list[Mapping[str, Any]]:
    """Return content as a list of chat messages; empty where it is text or ids."""
    if isinstance(content, Mapping):
        return [content]
    if isinstance(content, list | tuple) and content and isinstance(content[0], Mapping):
        return list(cast(Sequence[Mapping[str, Any]], content))
    return []


def split_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> tuple[list[Mapping[str, Any]], Sequence[Any]]:
    """Take the images out of parts ``{"type": "image", "image": ...}``: messages whose parts say where an image is, and
    the images in their order.

    Args:
        images: images beside messages whose parts have none.

    Raises:
        ValueError: some images are in parts, and others beside the messages.
    """
    own, written = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            own += [part["image"] for part in content if _holds_image(part)]
            message = {**message, "content": [{"type": "image"} if _holds_image(part) else part for part in content]}
        written.append(message)
    if own and images:
        raise ValueError(
            f"observe: got {len(own)} images in parts of messages and {len(images)} beside them; give all in one way"
        )
    return written, own or images


def _holds_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and part.get("image") is not None


def _mend_surrogates(text: str) -> str:
    """Join the halves of surrogate pairs, which no tokenizer takes; one that stands alone becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
