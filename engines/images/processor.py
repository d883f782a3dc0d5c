"""Images to patches, by the processor that the model was saved with: the same for the trainer and for vLLM."""

import hashlib
import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.batch.samples import Image
from engines.models.vision_spec import VisionSpec

if TYPE_CHECKING:
    from torch import Tensor

DECODING_ERRORS = (OSError, SyntaxError, ValueError)
"""Exceptions that Pillow's decoders raise."""
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes that it cuts off at 255 instead of scaling them."""
_ORIENTATION, _FIRST_ON_ITS_SIDE = 0x0112, 5
"""The EXIF tag that says how the camera was held, and the first of its values that swap width and height."""
_LAST_BYTES, _TAIL = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}, 1024
"""What whole files of a kind end with, but for a little; others are decoded to find out."""


class ImageProcessor:
    """Transformers' image processor of a model's folder.

    Attributes:
        settings: all settings that decide about pixels, defaults included.

    Raises:
        ValueError: the folder has none, or it cuts images otherwise than the model's vision tower expects.
    """

    def __init__(self, folder: str, vision: VisionSpec):
        from transformers import AutoImageProcessor

        try:
            self._process: Any = AutoImageProcessor.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"model: the image processor in {folder!r} cannot be read ({error}); save it there"
            ) from None
        self.vision = vision
        self.settings = {key: value for key, value in self._process.to_dict().items() if not key.endswith("_type")}
        # What transformers' own processor of whole rows asks for, whatever the folder says.
        self._options = {"crop_to_patches": True} if vision.tower.tiles else {}
        side = vision.patch * (vision.side or 0)
        cut = {"patch_size": vision.patch, "temporal_patch_size": vision.temporal_patch, "merge_size": vision.merge}
        whole = {"size": {"height": side, "width": side}}
        for name, expected in (whole if vision.side else cut).items():
            if (actual := getattr(self._process, name, None)) != expected:
                raise ValueError(
                    f"model: preprocessor_config.json in {folder!r} has {name} {actual}, expected {expected}, which "
                    "config.json has"
                )
        if vision.side and getattr(self._process, "do_pan_and_scan", None):
            raise ValueError(
                f"model: preprocessor_config.json in {folder!r} has do_pan_and_scan "
                f"{self._process.do_pan_and_scan}, expected false or null: an image is one, and is not cut into more"
            )

    def open(self, path: str | Path, place: str) -> Image:
        """Refer to an image, of which the header alone is decoded where the file has its end.

        Raises:
            ValueError: there is no such file, it is no image or cut short, or it is too narrow to be resized.
        """
        data = _read_bytes(path, place)
        width, height = self.check(data, repr(str(path)), place)
        grid = self._find_grid(width, height, f"{place}: {str(path)!r}")
        digest = hashlib.sha256(data).hexdigest()
        return Image(str(Path(path).absolute()), digest, (width, height), grid, place)

    def _find_grid(self, width: int, height: int, what: str) -> tuple[int, int, int]:
        """Find how an image of this size is cut: frames or tiles, and rows and columns of patches in each."""
        if self.vision.side:
            tiles = self._process.get_number_of_image_patches(height, width, self._options) if self._options else 1
            return tiles, self.vision.side, self.vision.side
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        cell, size = self.vision.patch * self.vision.merge, self._process.size
        try:
            rows, columns = smart_resize(height, width, cell, size["shortest_edge"], size["longest_edge"])
        except ValueError as error:
            raise ValueError(f"{what} is {width} x {height} pixels: {error}; crop it") from None
        return 1, rows // self.vision.patch, columns // self.vision.patch

    @staticmethod
    def check(data: bytes, name: str, place: str) -> tuple[int, int]:
        """Check an image and return its width and height in pixels, as it is shown.

        Raises:
            ValueError: it is none, of a kind that has no colours as they are, or cut short.
        """
        with _open_bytes(data, name, place) as image:
            if image.mode in _WIDE_MODES:
                raise ValueError(
                    f"{place}: {name} has more than 8 bits of grey ({image.mode}), which no model was shown; save it "
                    "with 8 bits"
                )
            width, height = image.size
            turned = _read_orientation(image) >= _FIRST_ON_ITS_SIDE
            end = _LAST_BYTES.get(image.format or "")
            if end is None or end not in data[-_TAIL:]:  # the rest would be found in the middle of the run
                _decode_rgb(image, name, place)
        return (height, width) if turned else (width, height)

    def patches(self, images: Sequence[Image]) -> "Tensor":
        """Make the pixels of images as their tower takes them, float32: patches ``[patches, patch_size]``, one image
        after another; or whole images, or the tiles of each, ``[n, channels, height, width]``, where all are of one
        size.

        Raises:
            ValueError: an image is gone, was changed, or cannot be decoded.
        """
        decoded, side = [decode(image) for image in images], self.vision.side
        processed = self._process(images=decoded, return_tensors="pt", **self._options)
        if not side:
            grids = processed["image_grid_thw"].tolist()
        elif self._options:
            grids = [[tiles, side, side] for tiles in processed["num_patches"].tolist()]
        else:
            return processed["pixel_values"]
        for image, grid in zip(images, grids, strict=True):
            if tuple(grid) != image.grid:
                raise ValueError(
                    f"{image.place}: the processor cut {image.path!r} into {grid} patches, expected {list(image.grid)}"
                )
        return processed["pixel_values"]


def decode(image: Image) -> Any:
    """Decode an image into Pillow's, as ``convert_to_rgb`` makes it.

    Raises:
        ValueError: the image is gone, was changed since it was first opened, or cannot be decoded.
    """
    data = _read_bytes(image.path, image.place)
    if hashlib.sha256(data).hexdigest() != image.digest:
        raise ValueError(f"{image.place}: {image.path!r} was changed since the run started; put it back")
    with _open_bytes(data, repr(image.path), image.place) as opened:
        return _decode_rgb(opened, repr(image.path), image.place)


def _decode_rgb(image: Any, name: str, place: str) -> Any:
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


def _read_bytes(path: str | Path, place: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{place}: {str(path)!r} cannot be read: {error.strerror}; mend the path or the file"
        ) from None


def _open_bytes(data: bytes, name: str, place: str) -> Any:
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    try:
        return PILImage.open(io.BytesIO(data))
    except (UnidentifiedImageError, OSError, PILImage.DecompressionBombError) as error:
        raise ValueError(f"{place}: {name} cannot be read as an image: {error}; replace it") from None
