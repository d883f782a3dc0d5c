"""Where the tokens of a batch's images are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.batch.samples import Image
from engines.models.vision_spec import VisionSpec


def find_image_blocks(ids: Sequence[int], images: Sequence[Image], vision: VisionSpec) -> np.ndarray:
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


def make_multimodal_positions(blocks: np.ndarray, images: Sequence[Image], merge: int) -> np.ndarray:
    """``[n, 3]``: time, height and width of each token of a sequence (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Text counts on alike in all three. An image starts where the text before it ended; its tokens differ by their place
    in it, and what follows starts past the longest of its sides. For an image of 2 x 3 tokens after one of text::

        time    0  1 1 1 1 1 1  4
        height  0  1 1 1 2 2 2  4
        width   0  1 2 3 1 2 3  4

    Args:
        blocks: as ``find_image_blocks`` gives them, image tokens of one image in a run.
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


def make_image_columns(
    sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]], vision: VisionSpec
) -> dict:
    """Columns of a ``TrainBatch`` that say where its images are; its sequences' last ids are no inputs.

    Args:
        sequences: whole ids of each sequence. images: those of each sequence, in order.

    Raises:
        ValueError: image tokens that are not those of the images.
    """
    import torch  # rows are checked before anything takes the time to import it

    blocks = [find_image_blocks(ids, own, vision)[:-1] for ids, own in zip(sequences, images, strict=True)]
    positions = [make_multimodal_positions(b, own, vision.merge) for b, own in zip(blocks, images, strict=True)]
    return {
        "image_block": torch.from_numpy(np.concatenate(blocks)),
        "positions": torch.from_numpy(np.concatenate(positions)),
        "images": tuple(tuple(own) for own in images),
    }
