"""Videos as rows and batches refer to them: images of several frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engines.batch.samples import Image

if TYPE_CHECKING:
    from engines.models.vision.vision_spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Video(Image):
    """A video on disk: a file of several frames, or a folder with an image for each frame.

    ``temporal_patch`` successive shown frames become one frame of its ``grid``. A prompt has the tokens of each such
    frame, after a text with its time.

    Attributes:
        frames: numbers of the shown frames, in ascending order. total: number of all frames.
        fps: frames per second.
    """

    is_video: ClassVar[bool] = True

    frames: tuple[int, ...]
    total: int
    fps: float

    @property
    def shown(self) -> int:
        """Number of pictures that are decoded."""
        return len(self.frames)

    def runs(self, vision: VisionSpec) -> list[tuple[int, int]]:
        """Return token and number of tokens of each run in a prompt, one run for each frame of its grid."""
        assert vision.video_token is not None
        return [(vision.video_token, self.tokens(vision.merge) // self.grid[0])] * self.grid[0]

    def times(self, depth: int) -> list[float]:
        """Return the time of each frame of its grid in seconds: the middle between the first and last of its ``depth``
        frames.

        If frames are missing at the end, the last one is repeated.
        """
        frames = [*self.frames, *[self.frames[-1]] * (-len(self.frames) % depth)]
        ends = zip(frames[::depth], frames[depth - 1 :: depth])
        # In transformers' own order of operations: a last bit decides how a time is rounded as it is written.
        return [(first / self.fps + last / self.fps) / 2 for first, last in ends]
