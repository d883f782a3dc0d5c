"""Files to Pillow's images, as the trainer and vLLM both see them."""

import hashlib
import io
import struct
from pathlib import Path
from typing import Any

from engines.batch.samples import Image

DECODING_ERRORS = (OSError, SyntaxError, ValueError)
"""Exceptions that Pillow's decoders raise."""
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes that it cuts off at 255 instead of scaling them."""
_ORIENTATION, _FIRST_ON_ITS_SIDE = 0x0112, 5
"""The EXIF tag that says how the camera was held, and the first of its values that swap width and height."""
_LAST_BYTES, _TAIL = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}, 1024
"""What whole files of a kind end with, but for a little; others are decoded to find out."""


def check_image(data: bytes, name: str, place: str) -> tuple[int, int]:
    """Check an image and return its width and height in pixels, as it is shown.

    Raises:
        ValueError: it is none, of a kind that has no colours as they are, or cut short.
    """
    with open_bytes(data, name, place) as image:
        if image.mode in _WIDE_MODES:
            raise ValueError(
                f"{place}: {name} has more than 8 bits of grey ({image.mode}), which no model was shown; save it "
                "with 8 bits"
            )
        width, height = image.size
        turned = _read_orientation(image) >= _FIRST_ON_ITS_SIDE
        end = _LAST_BYTES.get(image.format or "")
        if end is None or end not in data[-_TAIL:]:  # the rest would be found in the middle of the run
            decode_rgb(image, name, place)
    return (height, width) if turned else (width, height)


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
    try:
        return convert_to_rgb(image)
    except DECODING_ERRORS as error:
        raise ValueError(f"{place}: {name} cannot be decoded: {error}; replace it") from None


def convert_to_rgb(image: Any) -> Any:
    """Convert an image to RGB as a viewer shows it: turned as its camera was held, what is transparent on white. Raises
    DECODING_ERRORS."""
    from PIL import Image as PILImage
    from PIL import ImageOps

    if _read_orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = PILImage.new("RGBA", layer.size, "white")
    return PILImage.alpha_composite(ground, layer).convert("RGB")


def _read_orientation(image: Any) -> int:
    """Read how the camera was held; upright where the file's metadata is broken, as viewers take it."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, struct.error):
        return 1


def read_bytes(path: str | Path, place: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{place}: {str(path)!r} cannot be read: {error.strerror}; mend the path or the file"
        ) from None


def open_bytes(data: bytes, name: str, place: str) -> Any:
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    try:
        return PILImage.open(io.BytesIO(data))
    except (UnidentifiedImageError, OSError, PILImage.DecompressionBombError) as error:
        raise ValueError(f"{place}: {name} cannot be read as an image: {error}; replace it") from None
