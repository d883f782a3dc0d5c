"""Plain data of rollouts: images and videos, requests and completions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from engines.models.vision.vision_spec import VisionSpec

_COPIES = 3
"""Number of copies of an image's patches in memory: transformers 5 resizes, normalises and cuts, each into new
memory."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image on disk.

    Attributes:
        path, digest: the image's file, and the SHA-256 of its content.
        size: width and height in pixels.
        grid: the patches that the processor makes: number of frames or tiles, and rows and columns of each.
        place: row and field of the image, for messages: ``data: train.jsonl, line 3, image 0``.
    """

    is_video: ClassVar[bool] = False
    """Whether it is a ``Video``, of several frames."""

    path: str
    digest: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    place: str

    @property
    def patches(self) -> int:
        """Number of patches in all frames or tiles."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def shown(self) -> int:
        """Number of pictures that are decoded."""
        return 1

    def tokens(self, merge: int) -> int:
        """Return the number of image tokens: ``merge`` x ``merge`` patches become one token."""
        return self.patches // merge**2

    def runs(self, vision: VisionSpec) -> list[tuple[int, int]]:
        """Return token and number of tokens of each run in a prompt, one run for each frame of a video."""
        return [(vision.image_token, self.tokens(vision.merge))]

    def nbytes(self, vision: VisionSpec) -> int:
        """Estimate the bytes that decoding takes: pixels, fp32 patches, and the processor's temporary arrays."""
        return 3 * self.shown * self.size[0] * self.size[1] + _COPIES * 4 * self.patches * vision.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled piece of text.

    Attributes:
        token_ids: ``[T]`` int32, sampled ids, the stop token included.
        logprobs: ``[T]`` float32, log-probability of each sampled id under the policy that sampled it, at the sampling
            temperature; ``[0]`` if it was sampled greedily.
        finished: True if a stop token ended it; False if it was cut at the length limit.
        spans: the weights that sampled it, in order: version, and number of ids that these weights sampled; at least
            one.
        top_ids, top_logprobs: ``[T, k]`` int32 and float32, the k likeliest ids at each place and their logprobs; id -1
            and -inf if fewer ids may be sampled. None if they were not requested.
        routes: ``[P + T - 1, layers, k]`` int16, the experts by which every id of prompt and completion but the last
            was computed, -1 in a layer without experts. None if they are not recorded, or it was sampled greedily.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finished: bool
    spans: tuple[tuple[int, int], ...]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    routes: np.ndarray | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sampled the last id."""
        return self.spans[-1][0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Completion) and all(
            np.array_equal(getattr(self, column.name), getattr(other, column.name)) for column in fields(self)
        )


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling completions.

    Attributes:
        count: completions per prompt. temperature: 0 is greedy. max_tokens: most tokens of a completion.
        stream: seed of the random numbers. Samples repeat for the same stream, weights and prompts; different streams
            are independent.
        stop_token_ids: a completion ends with the first of these ids, and includes it.
        expected_tokens: expected length of a completion, by which prompts are divided over engines.
        top_logprobs: k, the number of likeliest ids whose logprobs come with each sampled id. Samples do not depend on
            it, and greedy samples come without.
        scores_prompt: score instead of sample: the completion is the prompt's own ids from the second on, with logprobs
            at temperature 1 and without banned ids.
    """

    count: int
    temperature: float
    max_tokens: int
    stream: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    expected_tokens: float = 0.0
    top_logprobs: int = 0
    scores_prompt: bool = False

    @property
    def seed(self) -> int:
        """Seed that is made from ``stream``."""
        return make_seed(self.stream)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the completions of one prompt.

    Attributes:
        token_ids: ids of the prompt, with as many image tokens as the model sees.
        sampling: settings for the completions.
        images: images and videos of the prompt, in order.
        goes_first: whether it is sampled before all requests that have not begun, if an engine samples ahead of the
            trainer.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    images: tuple[Image, ...] = ()
    goes_first: bool = False


def make_seed(stream: tuple[int, ...]) -> int:
    """Hash the numbers of a stream to a seed of 64 bits, so that streams do not overlap."""
    return int(np.random.SeedSequence(stream).generate_state(1, np.uint64)[0])
