"""Plain data that a model is given and answers with: images, prompts and completions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.models.vision_spec import VisionSpec

_COPIES = 3
"""Of an image's patches at once: transformers 5 resizes, normalises and cuts, each into memory of its own."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image on disk.

    Attributes:
        path, digest: where it is, and the SHA-256 of what is there.
        size: its width and height in pixels.
        grid: the patches that the processor makes of it: frames, rows, columns.
        place: where it was named, for messages, such as ``data: train.jsonl, line 3, image 0``.
    """

    path: str
    digest: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    place: str

    @property
    def patches(self) -> int:
        """Patches in all frames."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def tokens(self, merge: int) -> int:
        """Count the image tokens that stand for it: ``merge`` x ``merge`` patches become one."""
        return self.patches // merge**2

    def nbytes(self, vision: VisionSpec) -> int:
        """Estimate its bytes while it is decoded: its pixels, and its patches in fp32 with what the processor makes on
        the way to them."""
        return 3 * self.size[0] * self.size[1] + _COPIES * 4 * self.patches * vision.patch_size


@dataclass(frozen=True, slots=True)
class Prompt:
    """A completion goes on from this: ids, with as many image tokens as the model sees, and its images in order."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: sampled ids, the stop token included.
        logprobs: log-probability of each sampled id under the policy that drew it, at the sampling temperature.
        finished: ended by a stop token; False when it was cut at the length limit.
        version: version of the weights that sampled it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    version: int


@dataclass(frozen=True)
class Sampling:
    """Settings by which completions are drawn.

    Attributes:
        count: completions per prompt. temperature: 0 is greedy. max_tokens: the length limit.
        stream: numbers that name a stream of random numbers, as many of them for each use; draws repeat for the same
            stream, weights and prompts, and streams of different names have nothing in common.
        stop_token_ids: a completion ends with the first of these, which belongs to it.
        expected_tokens: of a completion, by which prompts are dealt out to engines.
    """

    count: int
    temperature: float
    max_tokens: int
    stream: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    expected_tokens: float = 0.0

    @property
    def seed(self) -> int:
        """Seed of 64 bits hashed from all of ``stream``: neighbours in one number never meet those in another."""
        return int(np.random.SeedSequence(self.stream).generate_state(1, np.uint64)[0])
