"""Plain data that a model is given and answers with: images and videos, requests and completions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engines.models.vision_spec import VisionSpec

_COPIES = 3
"""Of an image's patches at once: transformers 5 resizes, normalises and cuts, each into memory of its own."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image on disk.

    Attributes:
        path, digest: its file, and the SHA-256 of the file.
        size: width and height in pixels.
        grid: the patches that the processor makes of it: frames or tiles, and rows and columns of each.
        place: the row and field that name it, for messages: ``data: train.jsonl, line 3, image 0``.
    """

    path: str
    digest: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    place: str

    @property
    def patches(self) -> int:
        """Patches in all frames or tiles."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def shown(self) -> int:
        """Pictures that are decoded of it."""
        return 1

    def tokens(self, merge: int) -> int:
        """Count the image tokens that stand for it: ``merge`` x ``merge`` patches become one."""
        return self.patches // merge**2

    def runs(self, vision: VisionSpec) -> list[tuple[int, int]]:
        """List its runs of tokens in a prompt, one for each frame of its grid: the token, and how many there are."""
        return [(vision.image_token, self.tokens(vision.merge))]

    def nbytes(self, vision: VisionSpec) -> int:
        """Estimate its bytes while it is decoded: pixels, patches in fp32, and the processor's temporary arrays."""
        return 3 * self.shown * self.size[0] * self.size[1] + _COPIES * 4 * self.patches * vision.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled piece of text.

    Attributes:
        token_ids: ``[T]`` int32, sampled ids, the stop token included.
        logprobs: ``[T]`` float32, log-probability of each sampled id under the policy that drew it, at the sampling
            temperature; ``[0]`` where it was drawn greedily.
        finished: ended by a stop token; False when it was cut at the length limit.
        spans: which weights sampled it, in order: their version, and how many ids they sampled; at least one span.
        top_ids, top_logprobs: ``[T, k]`` int32 and float32, the k likeliest ids at each place and their logprobs; an
            entry that is not used, for want of ids that may be sampled, has id -1 and -inf. None where not asked for.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finished: bool
    spans: tuple[tuple[int, int], ...]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sampled its end."""
        return self.spans[-1][0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Completion) and all(
            np.array_equal(getattr(self, column.name), getattr(other, column.name)) for column in fields(self)
        )


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling completions.

    Attributes:
        count: completions per prompt. temperature: 0 is greedy. max_tokens: the length limit.
        stream: numbers that name a stream of random numbers. Samples repeat for the same stream, weights and prompts;
            different streams are independent.
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
        """Seed of ``stream``."""
        return make_seed(self.stream)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the completions of one prompt.

    Attributes:
        token_ids: of the prompt, with as many image tokens as the model sees. images: of it, and videos, in order.
        goes_first: before all that have not begun, where an engine samples ahead of the trainer.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    images: tuple[Image, ...] = ()
    goes_first: bool = False


def make_seed(stream: tuple[int, ...]) -> int:
    """Hash the numbers that name a stream to a seed of 64 bits, so that streams do not overlap."""
    return int(np.random.SeedSequence(stream).generate_state(1, np.uint64)[0])
