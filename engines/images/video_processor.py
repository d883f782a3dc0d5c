"""Videos: choose the shown frames and their times, and make patches by transformers' own processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.images.decoding import check_image, read_bytes
from engines.images.frames import check_one_size, decode_video, find_digest, find_rate, list_frames, measure_film
from engines.images.video import Video
from engines.models.vision.vision_spec import VisionSpec

if TYPE_CHECKING:
    from torch import Tensor

_NARROWEST = 4
"""Least pixels of a side; transformers takes a side of 1 or 3 for the colours."""


class VideoProcessor:
    """Transformers' video processor of a model's folder.

    Attributes:
        settings: all settings that affect pixels, defaults included.

    Raises:
        ValueError: the folder has no processor, or its patches are not those that the model's vision tower expects.
    """

    def __init__(self, folder: str, vision: VisionSpec):
        from transformers import AutoVideoProcessor

        try:
            self._process: Any = AutoVideoProcessor.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"model: the video processor in {folder!r} cannot be read ({error}); save it there"
            ) from None
        if (actual := type(self._process).__name__) != (expected := vision.tower.video_processor):
            raise ValueError(
                f"model: {folder!r} has a video processor of class {actual}, expected {expected}; save the model's "
                "video_preprocessor_config.json there"
            )
        self.vision = vision
        self.settings = {key: value for key, value in self._process.to_dict().items() if not key.endswith("_type")}
        cut = {"patch_size": vision.patch, "temporal_patch_size": vision.temporal_patch, "merge_size": vision.merge}
        for name, expected in cut.items():
            if (actual := getattr(self._process, name, None)) != expected:
                raise ValueError(
                    f"model: video_preprocessor_config.json in {folder!r} has {name} {actual}, expected {expected}, "
                    "which config.json has"
                )
        check_edges(self._process, f"video_preprocessor_config.json in {folder!r}")
        if (count := self._process.num_frames) and (fps := self._process.fps):
            raise ValueError(
                f"model: video_preprocessor_config.json in {folder!r} has num_frames {count} and fps {fps}, which is 2 "
                "where it is left out, expected one of them; set the other to null"
            )
        if getattr(self._process, "cap_pixels_per_frame", None):
            raise ValueError(
                f"model: video_preprocessor_config.json in {folder!r} has cap_pixels_per_frame, which is not built; "
                "lower its longest_edge, the pixels of all frames together, instead"
            )

    def open(
        self,
        path: str | Path,
        place: str,
        *,
        fps: float | None = None,
        rate: float | None = None,
        frames: Sequence[int] | None = None,
    ) -> Video:
        """Decode every frame of a video once and return a reference to it.

        Args:
            path: a file of several frames, or a folder of images in the order of their names.
            place: row and field of the video, for messages.
            fps: frames per second of the video; None takes the file's.
            rate: frames per second to show. frames: numbers of the frames to show. None for both takes the processor's
                rate, or its number of frames, which is lowered to that of the video.

        Raises:
            ValueError: the video is missing, has too few frames or another rate, or its frames are broken, differ in
                size or are too narrow to be resized.
        """
        what, path = f"{place}: {str(path)!r}", Path(path)
        files, whole = (list_frames(path), None) if path.is_dir() else ([], read_bytes(path, place))
        film = None if whole is None else measure_film(whole, path, place)
        total = len(film.durations) if film else len(files)
        if total < 2:
            raise ValueError(f"{what} has {total} frames, expected at least 2; one is shown as an image")
        fps = find_rate(film, fps, what)
        shown = self._choose_frames(total, fps, rate, frames, what)
        sources = [read_bytes(files[number], place) for number in shown] if whole is None else [whole]
        sizes = {film.size} if film else {check_image(data, repr(str(path)), place) for data in sources}
        check_one_size(sizes, what)
        size = sizes.pop()
        grid = self._find_grid(len(shown), size, what)
        digest = find_digest(sources, shown, fps)
        return Video(str(path.absolute()), digest, size, grid, place, shown, total, fps)

    def _choose_frames(
        self, total: int, fps: float, rate: float | None, frames: Sequence[int] | None, what: str
    ) -> tuple[int, ...]:
        """Choose the frames that are shown, as transformers does where a rate is given."""
        from transformers.video_utils import VideoMetadata

        if rate is not None and not 0 < rate <= fps:
            raise ValueError(
                f"{what} has {fps:g} frames a second, expected a rate up to that, got {rate:g}; lower rate"
            )
        if frames is None:
            count = self._process.num_frames if rate is None else None  # sample_frames does not read it itself
            metadata = VideoMetadata(total_num_frames=total, fps=fps)
            frames = self._process.sample_frames(metadata, num_frames=count and min(count, total), fps=rate).tolist()
        chosen = tuple(frames or ())
        if any(after <= before for before, after in zip([-1, *chosen], [*chosen, total])):
            raise ValueError(
                f"{what} has {total} frames, of which {list(chosen)} cannot be shown; number them from 0 on, in "
                "ascending order"
            )
        if len(chosen) < 2:
            raise ValueError(f"{what} has {len(chosen)} frames to show, expected at least 2; show one as an image")
        return chosen

    def _find_grid(self, frames: int, size: tuple[int, int], what: str) -> tuple[int, int, int]:
        """Find how so many frames of this size are cut: frames, rows and columns of patches."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        patch, depth, limits = self.vision.patch, self.vision.temporal_patch, self._process.size
        edges, cell = (limits["shortest_edge"], limits["longest_edge"]), patch * self.vision.merge
        width, height = size
        if min(size) < _NARROWEST:
            raise ValueError(f"{what} is {width} x {height} pixels, expected at least {_NARROWEST} on each side")
        try:
            rows, columns = smart_resize(frames, height, width, depth, cell, *edges)
        except ValueError as error:
            raise ValueError(f"{what} is {width} x {height} pixels: {error}; crop it") from None
        return -(-frames // depth), rows // patch, columns // patch

    def patches(self, videos: Sequence[Video]) -> "Tensor":
        """Make patches of videos in the tower's form: ``[patches, patch_size]`` float32, one video after another.

        Raises:
            ValueError: a video is gone, was changed, or cannot be decoded.
        """
        decoded = [decode_video(video) for video in videos]
        processed = self._process(videos=decoded, do_sample_frames=False, return_tensors="pt")
        for video, grid in zip(videos, processed["video_grid_thw"].tolist(), strict=True):
            if tuple(grid) != video.grid:
                raise ValueError(
                    f"{video.place}: the processor cut {video.path!r} into {grid} patches, expected {list(video.grid)}"
                )
        return processed["pixel_values_videos"]


def check_edges(processor: Any, file: str) -> None:
    """Raise ValueError unless a processor of transformers knows the fewest and most pixels of what it resizes.

    Args:
        file: the file with its settings, for the message.
    """
    size = processor.size
    lacking = [name for name in ("shortest_edge", "longest_edge") if not isinstance(size.get(name), int)]
    if lacking:
        got = {name: value for name, value in dict(size).items() if value is not None}
        raise ValueError(
            f"model: {file} has size {got} without {' and '.join(lacking)}; name its min_pixels shortest_edge and its "
            "max_pixels longest_edge, as transformers and vLLM read them"
        )
