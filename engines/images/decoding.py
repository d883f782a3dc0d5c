"""Decode image files with Pillow, in the same way for the trainer and for vLLM."""

import hashlib
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.batch.samples import Image

DECODING_ERRORS = (OSError, SyntaxError, ValueError, struct.error, EOFError, IndexError, RuntimeError)
"""Exceptions that Pillow's decoders raise; the last three for GIFs that are cut short and damaged AVIFs."""
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes that it clips at 255 instead of scaling them."""
_ORIENTATION = 0x0112
"""The EXIF tag of the camera's orientation."""
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
"""Pillow's names of the transpositions that make an image of tag 2, 3, ... upright; the last four swap its sides."""
_JPEG_END, _TAIL = b"\xff\xd9", 1024
"""End mark of a JPEG, and the number of last bytes in which it must stand."""


def check_image(data: bytes, name: str, place: str) -> tuple[int, int]:
    """Check an image and return its width and height in pixels, after rotation.

    Only the header of a JPEG with its end mark is read. Other formats are decoded, and their checksums verified.

    Args:
        data: content of the file. name, place: the image and its row, for messages.

    Raises:
        ValueError: the bytes are no image, have more than 8 bits of grey, or are damaged or truncated.
    """
    with open_bytes(data, name, place) as image, _naming_damage(name, place):
        image.verify()  # Pillow's decoder passes over checksums
    with open_bytes(data, name, place) as image:
        if image.format != "JPEG" or _JPEG_END not in data[-_TAIL:]:
            return decode_rgb(image, name, place).size
        return find_upright_size(image)


def decode(image: Image) -> Any:
    """Decode an image file to a Pillow image by ``convert_to_rgb``.

    Raises:
        ValueError: the file is gone, was changed since it was first opened, or cannot be decoded.
    """
    data = read_bytes(image.path, image.place)
    if hashlib.sha256(data).hexdigest() != image.digest:
        raise ValueError(f"{image.place}: {image.path!r} was changed since the run started; restore the old file")
    with open_bytes(data, repr(image.path), image.place) as opened:
        return decode_rgb(opened, repr(image.path), image.place)


def decode_rgb(image: Any, name: str, place: str) -> Any:
    """Convert a Pillow image by ``convert_to_rgb``, with errors that begin with ``place`` and have ``name``.

    Raises:
        ValueError: the image cannot be decoded, or has more than 8 bits of grey.
    """
    if image.mode in _WIDE_MODES:
        raise ValueError(
            f"{place}: {name} has more than 8 bits of grey ({image.mode}), which no model was shown; save it with 8 "
            "bits"
        )
    with _naming_damage(name, place):
        return convert_to_rgb(image)


@contextmanager
def _naming_damage(name: str, place: str) -> Iterator[None]:
    try:
        yield
    except DECODING_ERRORS as error:
        raise ValueError(f"{place}: {name} cannot be decoded: {error}; replace it") from None


def convert_to_rgb(image: Any) -> Any:
    """Convert a Pillow image to RGB as a viewer shows it: rotated by its EXIF orientation, transparent parts on white.

    Raises:
        DECODING_ERRORS: the image cannot be decoded.
    """
    from PIL import Image as PILImage

    image.load()  # which a look at the metadata would do too, and keep silent about damage
    if turn := _find_turn(image):  # ImageOps.exif_transpose writes metadata anew, which fails where some is broken
        image = image.transpose(PILImage.Transpose[turn])
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = PILImage.new("RGBA", layer.size, "white")
    return PILImage.alpha_composite(ground, layer).convert("RGB")


def find_upright_size(image: Any) -> tuple[int, int]:
    """Return width and height in pixels of a Pillow image, after rotation by its EXIF orientation."""
    width, height = image.size
    return (height, width) if _find_turn(image) in _TURNS[3:] else (width, height)


def _find_turn(image: Any) -> str:
    """Find the transposition that makes an image upright; empty where its EXIF orientation is broken or unknown."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except DECODING_ERRORS:
        return ""
    return dict(enumerate(_TURNS, start=2)).get(orientation, "")


def read_bytes(path: str | Path, place: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{place}: {str(path)!r} cannot be read: {error.strerror}; correct the path or the file"
        ) from None


def open_bytes(data: bytes, name: str, place: str) -> Any:
    from PIL import Image as PILImage

    try:
        return PILImage.open(io.BytesIO(data))
    except (*DECODING_ERRORS, PILImage.DecompressionBombError) as error:
        raise ValueError(f"{place}: {name} cannot be read as an image: {error}; replace it") from None
