"""The tokens that stand for images and videos in a prompt, for the trainer and in vLLM's requests.

Each frame of a video's grid is written as an image is, after the text of its time: ``<1.5 seconds>``.

In some families newlines surround an image (``Tower.margin``). A tokenizer merges neighbouring newlines to one token,
so that an image's newlines and the text's may be one token.
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

from packaging.version import Version

from engines.batch.samples import Image
from engines.images.video import Video
from engines.models.spec import ModelSpec
from engines.models.vision.vision_spec import VisionSpec
from hardware.vllm_versions import LONE_VIDEOS

_MOST = 4
"""Most newlines that vLLM merges to one token (0.32, model_executor/models/gemma3_mm)."""


@cache
def _read_tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer

    path = Path(folder, "tokenizer.json")
    if not path.is_file():
        raise ValueError(f"model: {folder!r} has no tokenizer.json, which says what surrounds images; save it there")
    return Tokenizer.from_file(str(path))


@cache
def read_newlines(folder: str) -> dict[int, int]:
    """Return count -> id of the tokens that are newlines alone, from a folder's tokenizer; ValueError if one lacks."""
    tokenizer = _read_tokenizer(folder)
    ids = {count: tokenizer.token_to_id("\n" * count) for count in range(1, _MOST + 1)}
    if lacking := [count for count, token in ids.items() if token is None]:
        raise ValueError(
            f"model: the tokenizer.json in {folder!r} has no token of {lacking[0]} newlines, which vLLM merges those "
            "of images to"
        )
    return {count: token for count, token in ids.items() if token is not None}


def write_times(video: Video, vision: VisionSpec, folder: str) -> list[list[int]]:
    """Return the tokens of the time of each frame of a video's grid, by the tokenizer in a model's folder."""
    tokenizer, times = _read_tokenizer(folder), video.times(vision.temporal_patch)
    return [tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False).ids for time in times]


def place_frames(video: Video, vision: VisionSpec, folder: str) -> list[int]:
    """Return the tokens of a video in a prompt: the time, start, frame and end tokens of each frame of its grid."""
    ids: list[int] = []
    for time, (token, count) in zip(write_times(video, vision, folder), video.runs(vision), strict=True):
        ids += [*time, vision.start_token, *[token] * count, vision.end_token]
    return ids


def make_placeholders(images: Sequence[Image], model: ModelSpec) -> list[int]:
    """Return the tokens of images and videos that follow one another in a prompt."""
    vision, ids = model.require_vision(), []
    margin = len(vision.tower.margin)
    newlines = read_newlines(model.folder) if margin else {}
    for number, image in enumerate(images):
        if isinstance(image, Video):
            ids += place_frames(image, vision, model.folder)
            continue
        if margin:
            ids.append(newlines[2 * margin if number else margin])
        ids += [vision.start_token, *[vision.image_token] * image.tokens(vision.merge), vision.end_token]
    return [*ids, newlines[margin]] if ids and margin else ids


def list_margin_tokens(model: ModelSpec) -> tuple[int, ...]:
    """Return the tokens that may be part of an image's margin."""
    return tuple(read_newlines(model.folder).values()) if model.vision and model.vision.tower.margin else ()


@cache
def wraps_videos() -> bool:
    """Tell whether vLLM looks for a video's token between a start and an end token."""
    return not LONE_VIDEOS.is_there or Version(version("transformers")) < Version("5.10")


def collapse_images(ids: Sequence[int], images: Sequence[Image], model: ModelSpec) -> list[int]:
    """Replace the tokens of each image in a prompt by the one placeholder that vLLM expands: ``[n] -> [m]`` ids.

    The placeholder is the image token; vLLM adds the tokens around tiles. In a family with a margin it is the start
    token, and vLLM adds the rest. For a video it is the video token, or what ``wraps_videos`` says; vLLM adds the times
    and the tokens around frames.
    """
    vision, remaining = model.require_vision(), list(images)
    collapsed, place = [], 0
    while place < len(ids):
        token = ids[place]
        image = remaining.pop(0) if token in vision.feature_tokens else None
        if isinstance(image, Video):
            begun = len(write_times(image, vision, model.folder)[0]) + 1  # first time and start, taken for text so far
            del collapsed[-begun:]
            place += len(place_frames(image, vision, model.folder)) - begun
            collapsed += [vision.start_token, token, vision.end_token] if wraps_videos() else [token]
        else:
            place += image.tokens(vision.merge) if image else 1
            collapsed.append(token)
    if vision.tower.tiles:  # of start, image and end the image stays
        start, image, end = vision.start_token, vision.image_token, vision.end_token
        pairs = list(pairwise([None, *collapsed, None]))  # each id with the one before it, and with the one after it
        kept = (pairs[i] != (image, end) and pairs[i + 1] != (start, image) for i in range(len(collapsed)))
        return list(compress(collapsed, kept))
    return _strip_margins(collapsed, model) if vision.tower.margin else collapsed


def check_margins(ids: Sequence[int], vision: VisionSpec, newlines: dict[int, int], where: str) -> None:
    """Check that vLLM keeps the newlines around each image as they are in the prompt.

    vLLM merges its own newlines with the text's, and then searches for its own. It finds three newlines before an image
    and fails on three after one (0.32, ``_find_mm_placeholders`` of model_executor/models/gemma3_mm).

    Args:
        ids: ids of a prompt. newlines: count -> id; empty for a family without margins.

    Raises:
        ValueError: newlines beside an image would be lost; the message begins with ``where``.
    """
    margin, counts = len(vision.tower.margin), {token: count for count, token in newlines.items()}
    if not margin:
        return
    sides = ((vision.start_token, -1, "before", range(margin, _MOST + 1)), (vision.end_token, 1, "after", (2, 4)))
    for place, token in enumerate(ids):
        for mark, step, side, known in sides:
            beside = ids[place + step] if 0 <= place + step < len(ids) else -1
            if token == mark and counts.get(beside) not in known:
                text = ", ".join(str(count - margin) for count in known)
                raise ValueError(
                    f"{where}: the text {side} an image meets the {margin} newlines that this family has there, and "
                    f"vLLM would not find the image again: expected {text} newlines of the text's own {side} <image>; "
                    "remove the others"
                )


def _strip_margins(ids: list[int], model: ModelSpec) -> list[int]:
    """Reduce ``margin start image end margin`` to the start token, and keep the text's own newlines."""
    vision, newlines = model.require_vision(), read_newlines(model.folder)
    counts = {token: count for count, token in newlines.items()}
    stripped: list[int] = []

    def strip(token: int) -> list[int]:
        left = counts.get(token, 0) - len(vision.tower.margin)
        return [token] if left < 0 else [newlines[left]] if left else []

    for before, token in zip([None, *ids], ids, strict=False):
        if token in (vision.image_token, vision.end_token):
            continue
        if token == vision.start_token and stripped:
            stripped += strip(stripped.pop())
        stripped += strip(token) if before == vision.end_token and token != vision.start_token else [token]
    return stripped
