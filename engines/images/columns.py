"""Batch columns with the places of image tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.batch.samples import Image
from engines.models.vision.vision_spec import VisionSpec


def find_image_blocks(ids: Sequence[int] | np.ndarray, images: Sequence[Image], vision: VisionSpec) -> np.ndarray:
    """Return the number of the image in its sequence for each of n ids, ``[n]``; -1 for text.

    Raises:
        ValueError: the image tokens do not match the images, each in one run, and the frames of the videos.
    """
    tokens = np.asarray(ids)
    is_image = np.isin(tokens, vision.feature_tokens)
    expected = [run for image in images for run in image.runs(vision)]
    # A run starts where the token before is none and ends past the last whose successor is none: [runs] each. Images
    # are kept apart by the ids between them (a start and an end token), so runs and frames are one to one.
    starts = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
    ends = np.flatnonzero(is_image & ~np.concatenate([is_image[1:], [False]])) + 1
    if (sizes := (ends - starts).tolist()) != [size for _, size in expected]:
        where = images[0].place if images else "a prompt without images"
        raise ValueError(
            f"{where}: a sequence has runs of {sizes} image tokens, expected {[size for _, size in expected]} from its "
            f"images' grids {[image.grid for image in images]}; ids of image tokens come from the images alone"
        )
    if not np.array_equal(tokens[is_image], np.repeat([token for token, _ in expected], sizes)):
        raise ValueError(
            f"{images[0].place}: a sequence has tokens of images and of videos in another order than it has those"
        )
    blocks = np.full(len(is_image), -1)
    blocks[is_image] = np.repeat(np.arange(len(images)), [image.tokens(vision.merge) for image in images])
    return blocks


def make_multimodal_positions(blocks: np.ndarray, images: Sequence[Image], merge: int) -> np.ndarray:
    """Make the positions ``[n, 3]`` of a sequence: time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Text counts up equally in all three. An image starts at the position after the text before it, and its tokens differ
    by their row and column. The text after it starts past the longest side of the image. Each frame of a video is
    placed as an image, with its time as text before it (Qwen3-VL). An image of 2 x 3 tokens after a text token::

        time    0  1 1 1 1 1 1  4
        height  0  1 1 1 2 2 2  4
        width   0  1 2 3 1 2 3  4

    Args:
        blocks: ``[n]``, from ``find_image_blocks``; tokens of an image, or of a video's frame, are in one run.
        images: the images of the sequence. merge: ``merge`` x ``merge`` patches are one token.
    """
    # `filled` ids have their positions; `position` is the next text token's.
    positions, filled, position = np.empty((len(blocks), 3), dtype=np.int64), 0, 0
    for number, image in enumerate(images):
        rows, columns = image.grid[1] // merge, image.grid[2] // merge  # in tokens
        # [3, 1, rows, columns] -> [tokens, 3], row by row, which is the order of the tower's features.
        places = np.indices((1, rows, columns)).reshape(3, -1).T
        for first in np.flatnonzero(blocks == number)[:: rows * columns].tolist():
            # The text before the frame, alike in all three: [first - filled, 1].
            positions[filled:first] = np.arange(position, position + first - filled)[:, None]
            position += first - filled
            filled = first + rows * columns
            positions[first:filled] = position + places
            position += max(rows, columns)
    positions[filled:] = np.arange(position, position + len(blocks) - filled)[:, None]
    return positions


def make_image_columns(
    sequences: Sequence[Sequence[int] | np.ndarray], images: Sequence[tuple[Image, ...]], vision: VisionSpec
) -> dict:
    """Make the columns of a ``TrainBatch`` that say where its images are.

    Args:
        sequences: all ids of each sequence. images: images of each sequence, in order.

    Returns:
        ``image_block`` ``[N]`` long and ``images``; with positions of three axes also ``positions`` ``[N, 3]`` long.

    Raises:
        ValueError: the image tokens do not match the images.
    """
    import torch  # rows are checked before anything takes the time to import it

    # The last id of a sequence is no input, so that L ids have L - 1 entries.
    blocks = [find_image_blocks(ids, shown, vision)[:-1] for ids, shown in zip(sequences, images, strict=True)]
    columns = {
        "image_block": torch.from_numpy(np.concatenate(blocks)),
        "images": tuple(tuple(shown) for shown in images),
    }
    if vision.axes:
        positions = [make_multimodal_positions(b, shown, vision.merge) for b, shown in zip(blocks, images, strict=True)]
        columns["positions"] = torch.from_numpy(np.concatenate(positions))
    return columns
