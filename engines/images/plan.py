"""The plan of a micro-batch's images: waves within a memory budget, and the part of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engines.batch.balance import balance_costs
from engines.batch.batch import TrainBatch
from engines.batch.samples import Image


@dataclass(frozen=True)
class VisionPlan:
    """The images of a micro-batch that each rank computes, and the row of features that each token reads.

    Ranks exchange their features, equally many rows each; equal images are computed once. Two ranks with images of 4
    and 2 tokens give 4 rows each: 0 to 3, and from the second rank 4 and 5; its rows 6 and 7 are padding.

    Attributes:
        images: images of each rank. height: number of rows that each rank returns.
        rows: ``[N]`` long, the row of each input among the ``ranks * height`` rows of all ranks, -1 for text.
    """

    images: tuple[tuple[Image, ...], ...]
    height: int
    rows: Tensor

    @classmethod
    def build(cls, micro: TrainBatch, merge: int, ranks: int) -> VisionPlan:
        """Divide the images of a micro-batch over ranks, by their numbers of patches.

        Args:
            merge: ``merge`` x ``merge`` patches of an image are one token. ranks: number of ranks.

        Raises:
            RuntimeError: the image tokens of the batch do not match its images.
        """
        # An image that several sequences have is seen by one rank, and its rows are read several times.
        uses = [image for shown in micro.images or () for image in shown]
        unique = list({image.digest: image for image in uses}.values())
        owner = balance_costs(
            np.asarray([image.patches for image in unique], dtype=np.int64), ranks, equal_counts=False
        )
        parts = [tuple(image for image, choice in zip(unique, owner) if choice == rank) for rank in range(ranks)]
        # A gather wants as many rows of each rank: rank r has rows r * height and on, and pads past its own images.
        height = max(sum(image.tokens(merge) for image in part) for part in parts)
        first_rows = {}  # digest -> row of the image's first token
        for rank, part in enumerate(parts):
            starts = accumulate((image.tokens(merge) for image in part), initial=rank * height)
            first_rows |= {image.digest: start for image, start in zip(part, starts)}
        rows = torch.full((micro.num_tokens,), -1, dtype=torch.long)
        # For each image that a sequence names, in the order of the stream: the rows of its tokens, one after another.
        numbers = [np.arange(image.tokens(merge)) + first_rows[image.digest] for image in uses]
        is_image = rows.ne(-1) if micro.image_block is None else micro.image_block >= 0
        token_counts = micro.sum_per_sequence(is_image.long()).tolist()
        for number, shown in enumerate(micro.images or ((),) * len(micro)):
            if token_counts[number] != (expected := sum(image.tokens(merge) for image in shown)):
                place = shown[0].place if shown else f"sequence {number} of a micro-batch, which has no images"
                raise RuntimeError(
                    f"{place}: the sequence has {token_counts[number]} image tokens, expected {expected}"
                )
        # Both sides follow the stream; counts agree sequence by sequence, so no row reaches a neighbour's token.
        rows[is_image] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *numbers]))
        return cls(tuple(parts), height, rows)
