"""Pictures of rows: what a row names becomes a reference, which the engines decode when they need it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.batch.samples import Image
from engines.images.columns import image_blocks
from engines.images.processor import ImageProcessor
from engines.models.spec import ModelSpec
from engines.models.vision_spec import VisionSpec

if TYPE_CHECKING:
    from rlworker.config.sections import DataConfig

MARKER = "<image>"
"""Where a picture is in the text of a prompt."""

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def refuse_other_fields(source: dict, where: str, data: "DataConfig") -> None:
    """Raise ValueError where a row seems to have pictures, in another field than the one that is asked for."""
    for name, value in source.items():
        if name in (data.image_field, data.prompt_field, data.answer_field):
            continue
        first = value[0] if isinstance(value, list) and value else value
        is_picture = isinstance(first, dict) and isinstance(first.get("bytes"), bytes)
        if is_picture or (isinstance(first, str) and first.lower().endswith(_ENDINGS)):
            raise ValueError(
                f'{where}: field "{name}" seems to have pictures, and no row has any in "{data.image_field}"; name the '
                f"field with --data.image-field {name}, or leave it out of rows that are text alone"
            )


@dataclass(frozen=True)
class Pictures:
    """What a vision-language model makes of pictures.

    Attributes:
        folder: keeps those that rows hold as bytes. limit: bytes that those of a row may take while they are decoded.
        opened: those that were read before, by their paths.
    """

    processor: ImageProcessor
    folder: Path
    limit: int
    opened: dict[Path, Image] = field(default_factory=dict)

    @property
    def vision(self) -> VisionSpec:
        return self.processor.vision

    def of_row(self, source: dict, where: str, data: "DataConfig", base: Path) -> tuple[Image, ...]:
        """A row's pictures in order.

        Args:
            base: the folder that relative paths start from.

        Raises:
            ValueError: one is missing, no picture, or too large; the message says which of which row.
        """
        named, found = source.get(data.image_field) or (), []
        for name in ("video", "videos"):
            if source.get(name):
                raise ValueError(
                    f'{where}: field "{name}" has videos, which the engine does not show a model; give pictures'
                )
        if not isinstance(named, list | tuple):
            named = [named]
        for number, picture in enumerate(named):
            place = f'{where}: field "{data.image_field}", picture {number}'
            path = self._path_of(picture, place, base)
            if path not in self.opened:  # rows of one picture have it read once
                self.opened[path] = self.processor.open(path, place)
            image = replace(self.opened[path], place=place)
            found.append(image)
            if (need := sum(own.nbytes(self.vision) for own in found)) > self.limit:
                raise ValueError(
                    f"{place}: {image.path!r}, {image.size[0]} x {image.size[1]} pixels, and the row's pictures before "
                    f"it take {need / 2**20:.1f} MB decoded, expected at most {self.limit / 2**20:.1f}; make them "
                    "smaller or raise image_memory_mb of --actor, and of --rollout where there is one"
                )
        return tuple(found)

    def _path_of(self, picture: Any, place: str, base: Path) -> Path:
        if isinstance(picture, str):
            return base / picture
        if isinstance(picture, dict) and isinstance(picture.get("bytes"), bytes):
            return self._kept(picture["bytes"], place)
        if isinstance(picture, dict) and isinstance(picture.get("path"), str):
            return base / picture["path"]
        raise ValueError(f'{place} must be a path or {{"bytes": ..., "path": ...}}, got {type(picture).__name__}')

    def _kept(self, data: bytes, place: str) -> Path:
        """The file that holds these bytes, named by what they are, so that it is written once."""
        path = self.folder / hashlib.sha256(data).hexdigest()
        if not path.is_file():
            self.processor.check(data, "its bytes", place)
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(data)
            partial.replace(path)
        return path

    def text_of(self, text: str, tokenizer: Any) -> str:
        """The prompt's text with tokens in the place of its markers."""
        vision = self.vision
        ids = [vision.start_token, vision.image_token, vision.end_token]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        if None in tokens or tokenizer.convert_tokens_to_ids(tokens) != ids:
            raise ValueError(
                f"model: the tokenizer calls tokens {ids}, which config.json gives to pictures, {tokens}; take the "
                "tokenizer that belongs to the model"
            )
        return text.replace(MARKER, "".join(tokens))

    def expanded(self, ids: Sequence[int], images: tuple[Image, ...], where: str, data: "DataConfig") -> list[int]:
        """Ids in which each picture has as many tokens as the tower makes of it.

        Raises:
            ValueError: the prompt has places for another number of pictures.
        """
        vision, left = self.vision, list(images)
        if (places := list(ids).count(vision.image_token)) != len(images):
            raise ValueError(
                f"{where}: the prompt has places for {places} pictures, the row has {len(images)} in its field "
                f'"{data.image_field}"; write {MARKER} once for each, or name another field with --data.image-field'
            )
        if vision.video_token in ids:
            raise ValueError(f"{where}: the prompt has the token of a video; give pictures")
        found: list[int] = []
        for token in ids:
            is_image = token == vision.image_token
            found += [token] * (left.pop(0).tokens(vision.merge) if is_image else 1)
        image_blocks(found, images, vision)
        return found


def pictures_of(model: ModelSpec, run_dir: str, limit_mb: int) -> Pictures | None:
    """For a model without vision None."""
    if model.vision is None:
        return None
    return Pictures(ImageProcessor(model.folder, model.vision), Path(run_dir) / "images", limit_mb * 2**20)
