"""Videos, as rows and batches refer to them: an image of several frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.batch.samples import Image

if TYPE_CHECKING:
    from engines.models.vision_spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Video(Image):
    """Frames of a video on disk: of a file of several frames, or of a folder that has an image for each.

    Successive frames, as many as a patch of the tower is deep, become one frame of its ``grid``, which a prompt shows
    as it shows an image, after the text that says when it was.

    Attributes:
        frames: numbers of those that are shown, in ascending order. total: how many there are.
        fps: how many there are in a second.
    """

    frames: tuple[int, ...]
    total: int
    fps: float

    @property
    def shown(self) -> int:
        """Pictures that are decoded of it."""
        return len(self.frames)

    def runs(self, vision: VisionSpec) -> list[tuple[int, int]]:
        """List its runs of tokens in a prompt, one for each frame of its grid: the token, and how many there are."""
        assert vision.video_token is not None
        return [(vision.video_token, self.tokens(vision.merge) // self.grid[0])] * self.grid[0]

    def times(self, depth: int) -> list[float]:
        """Compute the time of each frame of its grid in seconds: the middle of the first and the last of its ``depth``
        frames, of which the last is repeated where they do not suffice."""
        frames = [*self.frames, *[self.frames[-1]] * (-len(self.frames) % depth)]
        ends = zip(frames[::depth], frames[depth - 1 :: depth])
        # In transformers' own order of operations: a last bit decides how a time is rounded as it is written.
        return [(first / self.fps + last / self.fps) / 2 for first, last in ends]
