"""Frames of videos: folders of images, and video files that Pillow or OpenCV decodes."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engines.images.decoding import (
    DECODING_ERRORS,
    check_image,
    decode_rgb,
    find_upright_size,
    open_bytes,
    read_bytes,
)
from engines.images.video import Video

FRAME_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Endings of the names of files in a folder that are frames."""
_CLOCK = 10
"""Milliseconds of a GIF's clock, by which frames at one rate last longer or shorter."""
_MOST_MISSING = 0.05
"""Share of the announced frames that may be missing: some containers only estimate their number."""
_ALIKE = 0.01
"""Share by which two frame rates may differ that mean the same, such as 29.97 and 30."""


@dataclass(frozen=True)
class Film:
    """Durations and size of the frames of a video file.

    Attributes:
        durations: duration of each frame in milliseconds, 0 if the file states none. size: width and height in pixels.
        rate: frames per second that the file states apart from the durations; 0 if it states none.
        clock: milliseconds to which the file rounds each duration.
    """

    durations: list[float]
    size: tuple[int, int]
    rate: float = 0.0
    clock: float = 0.0


def list_frames(folder: Path) -> list[Path]:
    """Return the images in a folder in order of their names, in which numbers count as numbers: 9 is before 10."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in FRAME_ENDINGS]
    return sorted(files, key=lambda path: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.name)])


def measure_film(data: bytes, path: Path, place: str) -> Film:
    """Decode every frame of a video file and return their durations and size.

    Args:
        data: content of the file. path, place: the file and its row, for messages.

    Raises:
        ValueError: the file cannot be decoded, or is cut short.
    """
    opened = _open_by_pillow(data, path, place)
    return _measure_by_opencv(path, place) if opened is None else _measure_by_pillow(opened, data, path, place)


def find_rate(film: Film | None, fps: float | None, what: str) -> float:
    """Return the frame rate of a video in frames per second: ``fps``, or that of its file if ``fps`` is None.

    Args:
        film: the file, whose last duration is ignored; None for a folder.
        what: name of the video, for messages.

    Raises:
        ValueError: neither states a rate, the durations differ, or ``fps`` differs from the file's rate.
    """
    lasting = film.durations[:-1] if film else []
    if film is None or not any(lasting):
        if fps is None or not 0 < fps < float("inf"):
            raise ValueError(f'{what} does not say how many frames it has in a second; give "fps" in the row')
        return float(fps)
    if max(lasting) - min(lasting) > _CLOCK:
        raise ValueError(
            f"{what} has frames that last {min(lasting):g} to {max(lasting):g} ms, expected one rate; save it with one"
        )
    mean = sum(lasting) / len(lasting)
    # Times are rounded in a file, and a last bit decides how many frames are shown: the stated rate is the exact one.
    own = film.rate if abs(film.rate * mean / 1000 - 1) <= _ALIKE else 1000 * len(lasting) / sum(lasting)
    apart = max(film.clock / 2, _ALIKE * mean)
    if fps is not None and not (0 < fps < float("inf") and abs(1000 / fps - mean) <= apart):
        raise ValueError(f"{what} has {own:g} frames in a second, the row has fps {fps:g}; correct or remove fps")
    return float(fps or own)


def check_one_size(sizes: Collection[tuple[int, int]], what: str) -> None:
    """Raise ValueError, which begins with ``what``, if the frames of a video have several sizes in pixels."""
    if len(sizes) > 1:
        raise ValueError(f"{what} has frames of {sorted(sizes)} pixels, expected one size; make them alike")


def find_digest(sources: Iterable[bytes], frames: tuple[int, ...], fps: float) -> str:
    """Hash the content of files, the numbers of the shown frames, and the frame rate."""
    content = hashlib.sha256(repr((frames, fps)).encode())
    for data in sources:
        content.update(hashlib.sha256(data).digest())
    return content.hexdigest()


def decode_video(video: Video) -> np.ndarray:
    """Decode the shown frames of a video: ``[frames, height, width, 3]`` uint8.

    Raises:
        ValueError: the video is gone, was changed since it was first opened, or cannot be decoded.
    """
    path, place = Path(video.path), video.place
    files = list_frames(path) if path.is_dir() else []
    changed = ValueError(f"{place}: {video.path!r} was changed since the run started; restore the old file")
    if path.is_dir() and len(files) != video.total:
        raise changed
    names = [files[number] for number in video.frames] if path.is_dir() else [path]
    sources = [read_bytes(name, place) for name in names]
    if find_digest(sources, video.frames, video.fps) != video.digest:
        raise changed
    decoded = _decode_images(sources, video) if files else _decode_film(sources[0], video)
    return np.stack([np.asarray(frame) for frame in decoded])


def _decode_images(sources: Sequence[bytes], video: Video) -> Iterator[Any]:
    for data in sources:
        with open_bytes(data, repr(video.path), video.place) as opened:
            yield decode_rgb(opened, repr(video.path), video.place)


def _decode_film(data: bytes, video: Video) -> Iterator[Any]:
    opened = _open_by_pillow(data, Path(video.path), video.place)
    if opened is None:
        yield from _decode_by_opencv(video)
        return
    with opened as film:
        for number in video.frames:
            film.seek(number)
            yield decode_rgb(film, repr(video.path), video.place)


# -- Pillow


def _open_by_pillow(data: bytes, path: Path, place: str) -> Any:
    """Open a film; None where Pillow does not know its kind."""
    try:
        return open_bytes(data, repr(str(path)), place)
    except ValueError:
        return None


def _measure_by_pillow(opened: Any, data: bytes, path: Path, place: str) -> Film:
    name, durations, sizes = repr(str(path)), [], set()
    with opened as film:
        try:
            for number in range(getattr(film, "n_frames", 1)):  # of a GIF it is found by a search of the whole file
                film.seek(number)
                film.load()
                durations.append(float(film.info.get("duration", 0)))
                sizes.add(find_upright_size(film))
        except DECODING_ERRORS as error:
            raise ValueError(
                f"{place}: {name} cannot be decoded from frame {len(durations)} on: {error}; replace it"
            ) from None
    check_one_size(sizes, f"{place}: {name}")
    check_image(data, name, place)
    return Film(durations, sizes.pop(), clock=_CLOCK if opened.format == "GIF" else 1)


# -- OpenCV, which brings FFmpeg


def _open_by_opencv(path: Path, place: str) -> tuple[Any, Any]:
    """Open a film: OpenCV itself and its capture."""
    try:
        import cv2
    except ImportError:
        raise ValueError(
            f"{place}: {str(path)!r} is decoded by OpenCV, which is not there; pip install opencv-python-headless, or "
            "give a GIF, APNG or WebP, or a folder of its frames"
        ) from None
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    if not capture.isOpened():
        raise ValueError(
            f"{place}: {str(path)!r} cannot be read as a video; replace it, or give a folder of its frames"
        )
    return cv2, capture


def _measure_by_opencv(path: Path, place: str) -> Film:
    cv2, capture = _open_by_opencv(path, place)
    times, size = [], (0, 0)
    while capture.grab():
        times.append(capture.get(cv2.CAP_PROP_POS_MSEC))
        if len(times) == 1:  # as it is shown: turned as its camera was held
            height, width, _ = _take_frame(capture, path, 0, place).shape
            size = width, height
    if not times:
        raise ValueError(f"{place}: {str(path)!r} has no frame that can be decoded; replace it")
    announced = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    if len(times) < (1 - _MOST_MISSING) * announced:
        raise ValueError(f"{place}: {str(path)!r} ends after {len(times)} of {announced} frames; replace it")
    durations = [*(after - before for before, after in pairwise(times)), 0.0]
    return Film(durations, size, rate=capture.get(cv2.CAP_PROP_FPS))


def _decode_by_opencv(video: Video) -> Iterator[np.ndarray]:
    """Decode frames one after another from the first on: a place that is sought is not always the one that is found."""
    path, shown = Path(video.path), set(video.frames)
    cv2, capture = _open_by_opencv(path, video.place)
    for number in range(video.frames[-1] + 1):
        capture.grab()
        if number in shown:
            yield cv2.cvtColor(_take_frame(capture, path, number, video.place), cv2.COLOR_BGR2RGB)


def _take_frame(capture: Any, path: Path, number: int, place: str) -> np.ndarray:
    """Take the frame that was grabbed last."""
    found, frame = capture.retrieve()
    if not found:
        raise ValueError(f"{place}: frame {number} of {str(path)!r} cannot be decoded; replace it")
    return frame
