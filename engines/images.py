"""Pictures of a batch: by reference until a tower needs them, and where each of their tokens is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from engines.vision_spec import VisionSpec

if TYPE_CHECKING:  # rows are checked before anything takes the time to import torch
    from torch import Tensor

    from engines.batch import TrainBatch

_COPIES = 3
"""Of a picture's patches at once: transformers 5 resizes, normalises and cuts, each into memory of its own."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture on disk.

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
        frames, rows, columns = self.grid
        return frames * rows * columns

    def tokens(self, merge: int) -> int:
        """Image tokens that stand for it."""
        return self.patches // merge**2

    def nbytes(self, vision: VisionSpec) -> int:
        """Memory of it while it is decoded, about: its pixels, and its patches in fp32 with what the processor makes on
        the way to them."""
        return 3 * self.size[0] * self.size[1] + _COPIES * 4 * self.patches * vision.patch_size


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a completion goes on from: ids, with as many image tokens as the model sees, and its images in order."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()


def waves(costs: Sequence[int], budget: int) -> list[slice]:
    """Runs of consecutive things whose costs together stay within the budget; one that is dearer goes alone."""
    bounds, spent = [0], 0
    for number, cost in enumerate(costs):
        if spent + cost > budget and number > bounds[-1]:
            bounds.append(number)
            spent = 0
        spent += cost
    return [slice(start, stop) for start, stop in zip(bounds, [*bounds[1:], len(costs)])]


def image_blocks(ids: Sequence[int], images: Sequence[Image], vision: VisionSpec) -> np.ndarray:
    """``[n]``: the number of the image that each id of a sequence belongs to, -1 for text.

    Raises:
        ValueError: the image tokens are not those of the images, each in one run.
    """
    is_image = np.asarray(ids) == vision.image_token
    sizes = [image.tokens(vision.merge) for image in images]
    starts = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
    ends = np.flatnonzero(is_image & ~np.concatenate([is_image[1:], [False]])) + 1
    if (found := (ends - starts).tolist()) != sizes:
        where = images[0].place if images else "a prompt without images"
        raise ValueError(
            f"{where}: a sequence has runs of {found} image tokens, expected {sizes} from its images' grids "
            f"{[image.grid for image in images]}; ids of image tokens come from the images alone"
        )
    blocks = np.full(len(is_image), -1)
    blocks[is_image] = np.repeat(np.arange(len(images)), sizes)
    return blocks


def multimodal_positions(blocks: np.ndarray, images: Sequence[Image], merge: int) -> np.ndarray:
    """``[n, 3]``: time, height and width of each token of a sequence (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Text counts on alike in all three. An image starts where the text before it ended; its tokens differ by their place
    in it, and what follows starts past the longest of its sides. For an image of 2 x 3 tokens after one of text::

        time    0  1 1 1 1 1 1  4
        height  0  1 1 1 2 2 2  4
        width   0  1 2 3 1 2 3  4

    Args:
        blocks: as ``image_blocks`` gives them, image tokens of one image in a run.
    """
    positions, at, begin = np.empty((len(blocks), 3), dtype=np.int64), 0, 0
    for number, image in enumerate(images):
        frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        first = int(np.argmax(blocks == number))
        positions[at:first] = np.arange(begin, begin + first - at)[:, None]
        begin += first - at
        at = first + frames * rows * columns
        places = np.indices((frames, rows, columns)).reshape(3, -1).T
        positions[first:at] = begin + places
        begin += max(rows, columns)
    positions[at:] = np.arange(begin, begin + len(blocks) - at)[:, None]
    return positions


def image_columns(sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]], vision: VisionSpec) -> dict:
    """Columns of a ``TrainBatch`` that say where its images are; its sequences' last ids are no inputs.

    Args:
        sequences: whole ids of each sequence. images: those of each sequence, in order.

    Raises:
        ValueError: image tokens that are not those of the images.
    """
    import torch

    blocks = [image_blocks(ids, own, vision)[:-1] for ids, own in zip(sequences, images, strict=True)]
    positions = [multimodal_positions(b, own, vision.merge) for b, own in zip(blocks, images, strict=True)]
    return {
        "image_block": torch.from_numpy(np.concatenate(blocks)),
        "positions": torch.from_numpy(np.concatenate(positions)),
        "images": tuple(tuple(own) for own in images),
    }


def same_images(batch: TrainBatch) -> list[int] | None:
    """``[B]``: sequences with the same images have the same number; None where no sequence has an image."""
    if not batch.images or not any(batch.images):
        return None
    numbers: dict = {}
    keys = (tuple(image.digest for image in own) or row for row, own in enumerate(batch.images))
    return [numbers.setdefault(key, len(numbers)) for key in keys]


@dataclass(frozen=True)
class VisionPlan:
    """Which rank sees which pictures of a micro-batch, and where the features of each token come out.

    Ranks give their features, as many rows each, to one another; equal pictures are seen once.

    Attributes:
        images: of each rank. height: rows that each rank gives.
        rows: ``[N]`` long, the row of each input among those of all ranks, -1 for text.
    """

    images: tuple[tuple[Image, ...], ...]
    height: int
    rows: Tensor

    @classmethod
    def build(cls, micro: TrainBatch, merge: int, ranks: int) -> VisionPlan:
        """Split by count of patches.

        Raises:
            RuntimeError: the batch has other image tokens than its images have.
        """
        import torch

        from engines.schedule import balanced

        named = [image for own in micro.images or () for image in own]
        seen = list({image.digest: image for image in named}.values())
        owner = balanced(np.asarray([image.patches for image in seen], dtype=np.int64), ranks, counts_matter=False)
        parts = [tuple(image for image, its in zip(seen, owner) if its == rank) for rank in range(ranks)]
        height = max(sum(image.tokens(merge) for image in part) for part in parts)
        first = {}
        for rank, part in enumerate(parts):
            starts = accumulate((image.tokens(merge) for image in part), initial=rank * height)
            first |= {image.digest: start for image, start in zip(part, starts)}
        rows = torch.full((micro.num_tokens,), -1, dtype=torch.long)
        numbers = [np.arange(image.tokens(merge)) + first[image.digest] for image in named]
        is_image = rows.ne(-1) if micro.image_block is None else micro.image_block.cpu() >= 0
        have = micro.sum_per_sequence(is_image.long()).tolist()
        for number, own in enumerate(micro.images or ((),) * len(micro)):
            if have[number] != (wanted := sum(image.tokens(merge) for image in own)):
                place = own[0].place if own else f"sequence {number} of a micro-batch, which has no images"
                raise RuntimeError(f"{place}: the sequence has {have[number]} image tokens, expected {wanted}")
        rows[is_image] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *numbers]))
        return cls(tuple(parts), height, rows)
