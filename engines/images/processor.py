"""Turn images into patches by the processor that is saved with the model, for the trainer and for vLLM alike."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engines.batch.samples import Image
from engines.images.decoding import check_image, decode, read_bytes
from engines.images.video import Video
from engines.images.video_processor import VideoProcessor, check_edges
from engines.models.vision.vision_spec import VisionSpec

if TYPE_CHECKING:
    from torch import Tensor


class ImageProcessor:
    """Transformers' image processor of a model's folder.

    Attributes:
        settings: all settings that affect pixels, defaults included.

    Raises:
        ValueError: the folder has no processor, or its patches are not those that the model's vision tower expects.
    """

    def __init__(self, folder: str, vision: VisionSpec):
        from transformers import AutoImageProcessor

        try:
            self._process: Any = AutoImageProcessor.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"model: the image processor in {folder!r} cannot be read ({error}); save it there"
            ) from None
        self.folder, self.vision = folder, vision
        self.settings = {key: value for key, value in self._process.to_dict().items() if not key.endswith("_type")}
        # The settings of transformers' processor of whole rows, which override the folder's.
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
        if not vision.side:
            check_edges(self._process, f"preprocessor_config.json in {folder!r}")
        if vision.side and getattr(self._process, "do_pan_and_scan", None):
            raise ValueError(
                f"model: preprocessor_config.json in {folder!r} has do_pan_and_scan "
                f"{self._process.do_pan_and_scan}, expected false or null: an image is one, and is not cut into more"
            )

    def open(self, path: str | Path, place: str) -> Image:
        """Check an image file and return a reference to it; of a complete JPEG only the header is decoded.

        Args:
            place: row and field of the image, for messages.

        Raises:
            ValueError: the file is missing, no image, truncated, or too narrow to be resized.
        """
        data = read_bytes(path, place)
        width, height = check_image(data, repr(str(path)), place)
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

    @cached_property
    def videos(self) -> VideoProcessor:
        """The video processor of the folder, which is read at first use; ValueError as for images."""
        return VideoProcessor(self.folder, self.vision)

    def patches(self, images: Sequence[Image]) -> "Tensor":
        """Make the pixels of images and videos in the tower's form, float32.

        They are patches ``[patches, patch_size]``, one image after another; or, if all have one size, whole images or
        tiles ``[n, channels, height, width]``.

        Raises:
            ValueError: a file is gone, was changed, or cannot be decoded.
        """
        import torch

        runs = [[*run] for _, run in groupby(images, lambda image: isinstance(image, Video))]
        parts = [
            self.videos.patches(cast(list[Video], run)) if isinstance(run[0], Video) else self._patches(run)
            for run in runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _patches(self, images: Sequence[Image]) -> "Tensor":
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
