"""Which pictures are seen together, and by which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engines.batch.balance import balanced
from engines.batch.batch import TrainBatch
from engines.batch.samples import Image


def waves(costs: Sequence[int], budget: int) -> list[slice]:
    """Runs of consecutive things whose costs together stay within the budget; one that is dearer goes alone."""
    bounds, spent = [0], 0
    for number, cost in enumerate(costs):
        if spent + cost > budget and number > bounds[-1]:
            bounds.append(number)
            spent = 0
        spent += cost
    return [slice(start, stop) for start, stop in zip(bounds, [*bounds[1:], len(costs)])]


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
        is_image = rows.ne(-1) if micro.image_block is None else micro.image_block >= 0
        have = micro.sum_per_sequence(is_image.long()).tolist()
        for number, own in enumerate(micro.images or ((),) * len(micro)):
            if have[number] != (wanted := sum(image.tokens(merge) for image in own)):
                place = own[0].place if own else f"sequence {number} of a micro-batch, which has no images"
                raise RuntimeError(f"{place}: the sequence has {have[number]} image tokens, expected {wanted}")
        rows[is_image] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *numbers]))
        return cls(tuple(parts), height, rows)
