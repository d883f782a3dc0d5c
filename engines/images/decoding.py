"""Files to Pillow's images, as the trainer and vLLM both see them."""

import hashlib
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.batch.samples import Image

DECODING_ERRORS = (OSError, SyntaxError, ValueError, struct.error)
"""Exceptions that Pillow's decoders raise."""
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes that it cuts off at 255 instead of scaling them."""
_ORIENTATION = 0x0112
"""The EXIF tag that says how the camera was held."""
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
"""What Pillow calls that which makes an image upright whose tag is 2, 3, ...; the last four swap width and height."""
_JPEG_END, _TAIL = b"\xff\xd9", 1024
"""What a whole JPEG ends with, but for a little."""


def check_image(data: bytes, name: str, place: str) -> tuple[int, int]:
    """Check an image and return its width and height in pixels, as it is shown.

    Of a JPEG that has its end the header alone is read; formats with checksums are decoded and checked.

    Raises:
        ValueError: it is none, of a kind that has no colours as they are, damaged, or cut short.
    """
    with open_bytes(data, name, place) as image, _naming_damage(name, place):
        image.verify()  # Pillow's decoder passes over checksums
    with open_bytes(data, name, place) as image:
        if image.mode in _WIDE_MODES:
            raise ValueError(
                f"{place}: {name} has more than 8 bits of grey ({image.mode}), which no model was shown; save it "
                "with 8 bits"
            )
        if image.format != "JPEG" or _JPEG_END not in data[-_TAIL:]:
            return decode_rgb(image, name, place).size
        width, height = image.size
        return (height, width) if _find_turn(image) in _TURNS[3:] else (width, height)


def decode(image: Image) -> Any:
    """Decode an image into Pillow's, as ``convert_to_rgb`` makes it.

    Raises:
        ValueError: the image is gone, was changed since it was first opened, or cannot be decoded.
    """
    data = read_bytes(image.path, image.place)
    if hashlib.sha256(data).hexdigest() != image.digest:
        raise ValueError(f"{image.place}: {image.path!r} was changed since the run started; put it back")
    with open_bytes(data, repr(image.path), image.place) as opened:
        return decode_rgb(opened, repr(image.path), image.place)


def decode_rgb(image: Any, name: str, place: str) -> Any:
    with _naming_damage(name, place):
        return convert_to_rgb(image)


@contextmanager
def _naming_damage(name: str, place: str) -> Iterator[None]:
    try:
        yield
    except DECODING_ERRORS as error:
        raise ValueError(f"{place}: {name} cannot be decoded: {error}; replace it") from None


def convert_to_rgb(image: Any) -> Any:
    """Convert an image to RGB as a viewer shows it: turned as its camera was held, transparent pixels on white. Raises
    DECODING_ERRORS."""
    from PIL import Image as PILImage

    image.load()  # which a look at the metadata would do too, and keep silent about damage
    if turn := _find_turn(image):  # ImageOps.exif_transpose writes metadata anew, which fails where some is broken
        image = image.transpose(PILImage.Transpose[turn])
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = PILImage.new("RGBA", layer.size, "white")
    return PILImage.alpha_composite(ground, layer).convert("RGB")


def _find_turn(image: Any) -> str:
    """Find the turn that makes an image upright; none where its metadata is broken or says nothing, as viewers do."""
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
            f"{place}: {str(path)!r} cannot be read: {error.strerror}; mend the path or the file"
        ) from None


def open_bytes(data: bytes, name: str, place: str) -> Any:
    from PIL import Image as PILImage

    try:
        return PILImage.open(io.BytesIO(data))
    except (*DECODING_ERRORS, PILImage.DecompressionBombError) as error:
        raise ValueError(f"{place}: {name} cannot be read as an image: {error}; replace it") from None
