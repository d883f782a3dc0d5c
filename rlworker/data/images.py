"""Images and videos of rows: references to files, which the engines decode when they need them."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from engines.batch.samples import Image
from engines.images.columns import find_image_blocks
from engines.images.decoding import check_image, decode_rgb, read_bytes
from engines.images.placeholders import check_margins, place_frames, read_newlines
from engines.images.processor import ImageProcessor
from engines.images.video import Video
from engines.models.spec import ModelSpec
from engines.models.vision.vision_spec import VisionSpec
from engines.validation import fits, spell
from rlworker.config.sections import DataConfig
from rlworker.data.bad_images import naming_bad_images
from rlworker.data.chat.messages import MARKER, VIDEO_MARKER

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Endings of the names of image files."""
_VIDEO_KEYS = {"path": str, "fps": float, "rate": float, "frames": list[int]}


@dataclass(frozen=True)
class ImageReader:
    """Turns the images and videos of rows into references to files, with the sizes that one vision-language model sees.

    Attributes:
        processor: the model's image processor.
        folder: folder to which images are written that rows hold as bytes.
        limit: most bytes of a row's images while they are decoded.
        newlines: count -> id of the token that is so many newlines, for a family that surrounds images by newlines.
        opened: path (of videos: path and settings) -> reference, so that each file is opened once.
    """

    processor: ImageProcessor
    folder: Path
    limit: int
    newlines: dict[int, int] = field(default_factory=dict)
    opened: dict[Any, Image] = field(default_factory=dict)

    @property
    def vision(self) -> VisionSpec:
        return self.processor.vision

    def read_row(self, source: dict, where: str, data: DataConfig, base: Path) -> tuple[Image, ...]:
        """Return the images of a row in order, followed by its videos.

        Args:
            source: the row. where: place of the row, for messages.
            base: the folder that relative paths start from.

        Raises:
            ValueError: an image or video is missing, unreadable or too large; the message names row and image.
        """
        for name in {"video", "videos"} - {data.video_field}:
            if source.get(name):
                raise ValueError(
                    f'{where}: field "{name}" has videos, but videos are read from field "{data.video_field}"; set '
                    f'--data.video-field {name}, or remove field "{name}" from the rows'
                )
        images = self.read_images(_list(source.get(data.image_field)), f'{where}: field "{data.image_field}"', base)
        if not (videos := _list(source.get(data.video_field))):
            return images
        if reason := self.vision.tower.no_videos:
            raise ValueError(
                f'{where}: field "{data.video_field}" has videos, but this model cannot be given videos here: '
                f'{reason}; remove the field, or give frames as images in field "{data.image_field}"'
            )
        return self._read_videos(videos, f'{where}: field "{data.video_field}"', base, images)

    def read_images(self, sources: Sequence[Any], where: str, base: Path) -> tuple[Image, ...]:
        """Return the images of ``sources``, with the checks of ``read_row``.

        Args:
            sources: for each image a path as text, ``{"bytes": ...}``, or verl's ``{"image": path}``; or a ``Path``,
                whose content is kept as it is at this call.
        """
        images = []
        for number, value in enumerate(sources):
            place = f"{where}, image {number}"
            with naming_bad_images():
                path = self._find_file(value, place, base)
                if path not in self.opened:  # rows of one image have it read once
                    self.opened[path] = self.processor.open(path, place)
                images.append(replace(self.opened[path], place=place))
                self._check_memory(images)
        return tuple(images)

    def read_shown(self, images: Sequence[Any], where: str, base: Path) -> tuple[Image, ...]:
        """Return what an environment shows: paths, bytes, Pillow's images, and images and videos of a row.

        Videos, which were read with their row, come last.
        """
        stills = [image for image in images if not isinstance(image, Video)]
        named = [_name_image(image, f"{where}, image {number}") for number, image in enumerate(stills)]
        videos = [image for image in images if isinstance(image, Video)]
        return (*self.read_images(named, where, base), *videos)

    def _read_videos(
        self, sources: Sequence[Any], where: str, base: Path, images: tuple[Image, ...]
    ) -> tuple[Image, ...]:
        """Return the images of a row, and behind them its videos."""
        shown, processor = list(images), self.processor.videos
        for number, value in enumerate(sources):
            place = f"{where}, video {number}"
            with naming_bad_images():
                settings = _read_video(value, place)
                path = _join(base, settings.pop("path"), place)
                key = (path, repr(settings))
                if key not in self.opened:
                    self.opened[key] = processor.open(path, place, **settings)
                shown.append(replace(self.opened[key], place=place))
                self._check_memory(shown)
        return tuple(shown)

    def _check_memory(self, images: Sequence[Image]) -> None:
        """Raise ValueError where the images of a row, with the new last one, exceed the memory limit."""
        last, need = images[-1], sum(each.nbytes(self.vision) for each in images)
        if need > self.limit:
            frames = f", {last.shown} frames" if isinstance(last, Video) else ""
            raise ValueError(
                f"{last.place}: {last.path!r}{frames}, {last.size[0]} x {last.size[1]} pixels, and the images before "
                f"it take {need / 2**20:.1f} MB decoded, expected at most {self.limit / 2**20:.1f}; make them "
                "smaller or raise image_memory_mb of --actor, and of --rollout where there is one"
            )

    def _find_file(self, value: Any, place: str, base: Path) -> Path:
        if isinstance(value, dict):
            value = _read_image(value, place)
        if isinstance(value, bytes):
            return self._store(value, "its bytes", place)
        if isinstance(value, Path):
            path = _join(base, str(value), place)
            return self._store(read_bytes(path, place), repr(str(path)), place)
        if isinstance(value, str):
            return _join(base, value, place)
        raise ValueError(
            f'{place} must be a path, {{"bytes": ..., "path": ...}} or {{"image": path}}, got {type(value).__name__}'
        )

    def _store(self, data: bytes, name: str, place: str) -> Path:
        """Write these bytes to a file named by their SHA-256, once, and return its path."""
        path = self.folder / hashlib.sha256(data).hexdigest()
        if not path.is_file():
            check_image(data, name, place)
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{uuid4().hex}.partial")  # another process may store the same image
            partial.write_bytes(data)
            partial.replace(path)
        return path

    def replace_markers(self, text: str, tokenizer: Any) -> str:
        """Replace ``<image>`` and ``<video>`` in a prompt by one token each, which ``expand_ids`` repeats later."""
        vision = self.vision
        ids = [vision.start_token, vision.image_token, vision.end_token]
        ids += [] if vision.tower.no_videos or vision.video_token is None else [vision.video_token]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        if None in tokens or tokenizer.convert_tokens_to_ids(tokens) != ids:
            raise ValueError(
                f"model: the tokenizer calls tokens {ids}, which config.json gives to images, {tokens}; take the "
                "tokenizer that belongs to the model"
            )
        margin, (start, image, end, *video) = vision.tower.margin, tokens
        text = text.replace(MARKER, f"{margin}{start}{image}{end}{margin}")
        return text.replace(VIDEO_MARKER, *video) if video else text

    def refuse_other_fields(self, source: dict, where: str, data: DataConfig) -> None:
        """Raise ValueError if a row seems to have images in a field other than ``data.image_field``."""
        for name, value in source.items():
            if name in (data.image_field, data.video_field, data.prompt_field, data.answer_field):
                continue
            first = value[0] if isinstance(value, list) and value else value
            is_image = isinstance(first, dict) and isinstance(first.get("bytes"), bytes)
            if is_image or (isinstance(first, str) and first.lower().endswith(_ENDINGS)):
                raise ValueError(
                    f'{where}: field "{name}" seems to have images, and no row has any in "{data.image_field}"; name '
                    f'the field with --data.image-field {name}, or remove field "{name}" if rows are text alone'
                )

    def check_places(self, ids: Sequence[int], images: Sequence[Image], where: str, data: DataConfig) -> None:
        """Raise ValueError if the number of images or videos differs from their places in a prompt's ids."""
        videos = sum(isinstance(image, Video) for image in images)
        for token, kind, marker, count, option in (
            (self.vision.image_token, "images", MARKER, len(images) - videos, "image_field"),
            (self.vision.video_token, "videos", VIDEO_MARKER, videos, "video_field"),
        ):
            if (places := list(ids).count(token) if token is not None else 0) != count:
                raise ValueError(
                    f"{where}: the prompt has places for {places} {kind}, the row has {count} in its field "
                    f'"{getattr(data, option)}"; write {marker} once for each, or name another field with '
                    f"--data.{option.replace('_', '-')}"
                )

    def expand_ids(
        self, ids: Sequence[int], images: tuple[Image, ...], where: str, data: DataConfig
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Repeat each image token as often as the image has tokens, and replace each video token by the tokens of its
        frames.

        Args:
            ids: ids of a prompt, ``[n]``.
            images: images and videos of the prompt, each kind in order.
            where: place of the prompt, for messages.

        Returns:
            the ids ``[m]``, and the images and videos in the order of their places.

        Raises:
            ValueError: the number of images differs from their places, or newlines would be lost beside an image.
        """
        vision, ids = self.vision, list(ids)
        stills = [image for image in images if not isinstance(image, Video)]
        videos = [image for image in images if isinstance(image, Video)]
        if vision.tower.no_videos and vision.video_token in ids:
            raise ValueError(f"{where}: the prompt has the token of a video, which this model cannot see; give images")
        self.check_places(ids, images, where, data)
        check_margins(ids, vision, self.newlines, where)
        expanded: list[int] = []
        ordered: list[Image] = []
        for token in ids:
            if token == vision.image_token:
                ordered.append(stills.pop(0))
                expanded += [token] * ordered[-1].tokens(vision.merge)
            elif token == vision.video_token:
                ordered.append(video := videos.pop(0))
                expanded += place_frames(video, vision, self.processor.folder)
            else:
                expanded.append(token)
        find_image_blocks(expanded, ordered, vision)
        return expanded, tuple(ordered)


def _list(value: Any) -> Sequence[Any]:
    """Return the value of a row's field as a list: several, one, or none."""
    return value if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]


def _join(base: Path, path: str, place: str) -> Path:
    if path.startswith("data:"):
        raise ValueError(
            f"{place} is a data: URI, {path[:32]!r} and {len(path)} characters in all, expected a path; save what it "
            'encodes as a file, or give it decoded as {"bytes": ...} in a table'
        )
    return base / path


def _read_image(value: dict, place: str) -> Any:
    """Read the description of an image in a row, this project's or verl's: its path or bytes.

    Raises:
        ValueError: it has settings of its own, which the processor's would override.
    """
    given = {key: each for key, each in value.items() if each is not None}  # tables fill rows up
    if settings := sorted(given.keys() - {"bytes", "path", "image", "type"}):
        raise ValueError(
            f"{place} has {settings[0]!r}, which images here are not read by; leave it out, and set the pixels of all "
            "images in the model's preprocessor_config.json"
        )
    source = given.get("bytes", given.get("image", given.get("path")))
    return source.removeprefix("file://") if isinstance(source, str) else source


def _read_video(value: Any, place: str) -> dict[str, Any]:
    """Read the description of a video in a row: its path, and arguments of ``VideoProcessor.open``."""
    settings = {"path": value} if isinstance(value, str) else value
    if isinstance(settings, dict) and isinstance(settings.get("video"), str):  # verl's
        settings = {"path": settings["video"].removeprefix("file://")} | settings
        settings = {key: setting for key, setting in settings.items() if key not in ("video", "type")}
    if not isinstance(settings, dict) or not isinstance(settings.get("path"), str):
        raise ValueError(
            f'{place} must be a path, {{"path": ..., "fps": ...}} or {{"video": path}}, got {type(value).__name__}'
        )
    settings = {key: setting for key, setting in settings.items() if setting is not None}  # tables fill rows up
    for key, setting in settings.items():
        if key not in _VIDEO_KEYS:
            raise ValueError(f"{place} has {key!r}, expected some of {', '.join(_VIDEO_KEYS)}; remove {key!r}")
        if not fits(_VIDEO_KEYS[key], setting):
            raise ValueError(f"{place} has {key} {setting!r}, expected {spell(_VIDEO_KEYS[key])}")
    if "rate" in settings and "frames" in settings:
        raise ValueError(f"{place} has both rate and frames, which both choose the frames; remove one of the two")
    return settings


def _name_image(image: Any, place: str) -> Any:
    """Name an image as ``ImageReader.read_images`` takes it: by its bytes, or by its path."""
    if isinstance(image, Image):
        return image.path
    if isinstance(image, str | Path):
        return Path(image)  # not as text: the environment may write the next image to the same file
    if isinstance(image, bytes):
        return {"bytes": image}
    if hasattr(image, "save"):  # Pillow's
        buffer = io.BytesIO()
        decode_rgb(image, "the image", place).save(buffer, format="PNG")
        return {"bytes": buffer.getvalue()}
    raise ValueError(f"{place} is a {type(image).__name__}, expected a path, bytes or a Pillow image")


def build_image_reader(model: ModelSpec, run_dir: str, limit_mb: int) -> ImageReader:
    """Make the image reader of a vision-language model, which stores images in the run folder.

    Args:
        limit_mb: most memory in MB of a row's images while they are decoded.
    """
    vision = model.require_vision()
    newlines = read_newlines(model.folder) if vision.tower.margin else {}
    return ImageReader(ImageProcessor(model.folder, vision), Path(run_dir) / "images", limit_mb * 2**20, newlines)
