"""Images of rows: what a row names becomes a reference, which the engines decode when they need it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.batch.samples import Image
from engines.images.columns import find_image_blocks
from engines.images.placeholders import check_margins, read_newlines
from engines.images.processor import ImageProcessor
from engines.models.spec import ModelSpec
from engines.models.vision_spec import VisionSpec

if TYPE_CHECKING:
    from rlworker.config.sections import DataConfig

MARKER = "<image>"
"""The marker that stands for an image in the text of a prompt."""

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def refuse_other_fields(source: dict, where: str, data: "DataConfig") -> None:
    """Raise ValueError where a row seems to have images, in another field than the one that is asked for."""
    for name, value in source.items():
        if name in (data.image_field, data.prompt_field, data.answer_field):
            continue
        first = value[0] if isinstance(value, list) and value else value
        is_image = isinstance(first, dict) and isinstance(first.get("bytes"), bytes)
        if is_image or (isinstance(first, str) and first.lower().endswith(_ENDINGS)):
            raise ValueError(
                f'{where}: field "{name}" seems to have images, and no row has any in "{data.image_field}"; name the '
                f"field with --data.image-field {name}, or leave it out of rows that are text alone"
            )


@dataclass(frozen=True)
class ImageReader:
    """Turns the images that rows name into references, as one vision-language model sees them.

    Attributes:
        folder: keeps the images that rows hold as bytes.
        limit: bytes that the images of a row may take while they are decoded.
        newlines: tokens that are newlines alone, count -> id, of a family that surrounds images by them.
        opened: those that were read before, by their paths.
    """

    processor: ImageProcessor
    folder: Path
    limit: int
    newlines: dict[int, int] = field(default_factory=dict)
    opened: dict[Path, Image] = field(default_factory=dict)

    @property
    def vision(self) -> VisionSpec:
        return self.processor.vision

    def read_row(self, source: dict, where: str, data: "DataConfig", base: Path) -> tuple[Image, ...]:
        """Return the images of a row in order.

        Args:
            base: the folder that relative paths start from.

        Raises:
            ValueError: one is missing, no image, or too large; the message says which of which row.
        """
        sources = source.get(data.image_field) or ()
        for name in ("video", "videos"):
            if source.get(name):
                raise ValueError(
                    f'{where}: field "{name}" has videos, which the engine does not show a model; give images'
                )
        if not isinstance(sources, list | tuple):
            sources = [sources]
        return self.read_images(sources, f'{where}: field "{data.image_field}"', base)

    def read_images(self, sources: Sequence[Any], where: str, base: Path) -> tuple[Image, ...]:
        """Return images that belong together, each a path or ``{"bytes": ...}``, as ``read_row`` does."""
        images = []
        for number, value in enumerate(sources):
            place = f"{where}, image {number}"
            path = self._find_file(value, place, base)
            if path not in self.opened:  # rows of one image have it read once
                self.opened[path] = self.processor.open(path, place)
            image = replace(self.opened[path], place=place)
            images.append(image)
            if (need := sum(each.nbytes(self.vision) for each in images)) > self.limit:
                raise ValueError(
                    f"{place}: {image.path!r}, {image.size[0]} x {image.size[1]} pixels, and the images before "
                    f"it take {need / 2**20:.1f} MB decoded, expected at most {self.limit / 2**20:.1f}; make them "
                    "smaller or raise image_memory_mb of --actor, and of --rollout where there is one"
                )
        return tuple(images)

    def _find_file(self, value: Any, place: str, base: Path) -> Path:
        if isinstance(value, str):
            return base / value
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return self._store(value["bytes"], place)
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return base / value["path"]
        raise ValueError(f'{place} must be a path or {{"bytes": ..., "path": ...}}, got {type(value).__name__}')

    def _store(self, data: bytes, place: str) -> Path:
        """Write these bytes to a file named by what they are, so that it is written once, and return its path."""
        path = self.folder / hashlib.sha256(data).hexdigest()
        if not path.is_file():
            self.processor.check(data, "its bytes", place)
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(data)
            partial.replace(path)
        return path

    def replace_markers(self, text: str, tokenizer: Any) -> str:
        """Put the model's image tokens in the place of a prompt's markers."""
        vision = self.vision
        ids = [vision.start_token, vision.image_token, vision.end_token]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        if None in tokens or tokenizer.convert_tokens_to_ids(tokens) != ids:
            raise ValueError(
                f"model: the tokenizer calls tokens {ids}, which config.json gives to images, {tokens}; take the "
                "tokenizer that belongs to the model"
            )
        margin = vision.tower.margin
        return text.replace(MARKER, f"{margin}{''.join(tokens)}{margin}")

    def expand_ids(self, ids: Sequence[int], images: tuple[Image, ...], where: str, data: "DataConfig") -> list[int]:
        """Repeat the token of each image as often as the tower makes tokens of it: ``[n] -> [m]`` ids.

        Raises:
            ValueError: the prompt has places for another number of images, or newlines that would be lost beside one.
        """
        vision, remaining = self.vision, list(images)
        if (places := list(ids).count(vision.image_token)) != len(images):
            raise ValueError(
                f"{where}: the prompt has places for {places} images, the row has {len(images)} in its field "
                f'"{data.image_field}"; write {MARKER} once for each, or name another field with --data.image-field'
            )
        if vision.video_token in ids:
            raise ValueError(f"{where}: the prompt has the token of a video; give images")
        check_margins(ids, vision, self.newlines, where)
        expanded: list[int] = []
        for token in ids:
            is_image = token == vision.image_token
            expanded += [token] * (remaining.pop(0).tokens(vision.merge) if is_image else 1)
        find_image_blocks(expanded, images, vision)
        return expanded


def build_image_reader(model: ModelSpec, run_dir: str, limit_mb: int) -> ImageReader | None:
    """Make the image reader of a model, which writes into the run folder; None for a model without vision."""
    if model.vision is None:
        return None
    newlines = read_newlines(model.folder) if model.vision.tower.margin else {}
    return ImageReader(ImageProcessor(model.folder, model.vision), Path(run_dir) / "images", limit_mb * 2**20, newlines)
