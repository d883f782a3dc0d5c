"""Prompts that sequences of a batch have in common: found on the host, once, by comparing all that goes in."""

from dataclasses import dataclass

import numpy as np

from engines.batch.batch import TrainBatch
from engines.config import MegatronConfig
from hardware.attention.mask_spec import Sharing
from hardware.platform import Platform


@dataclass(frozen=True)
class Prompts:
    """The prompts of B sequences: the inputs up to the one that predicts a sequence's first counted target.

    Attributes:
        numbers: ``[B]``, alike where prompts are. counts: ``[B]``, inputs of each; 0 where no target counts.
        copied_slots: what a token takes beside its slot, in slots: its sequence's copy of its keys and values.
    """

    numbers: np.ndarray
    counts: np.ndarray
    copied_slots: float = 0.0

    def share(self, rows: np.ndarray) -> Sharing | None:
        """Tell which of a micro-batch's sequences ``rows`` ``[b]`` begin alike: each prompt is the first one's that has
        it. None where no two do."""
        first: dict[int, int] = {}
        owners = [first.setdefault(number, place) for place, number in enumerate(self.numbers[rows].tolist())]
        counts = [0 if owner == place else count for place, (owner, count) in enumerate(zip(owners, self.counts[rows]))]
        if not any(counts):
            return None
        owners = [owner if count else place for place, (owner, count) in enumerate(zip(owners, counts))]
        return Sharing(tuple(owners), tuple(map(int, counts)))


def shares_prompts(config: MegatronConfig, platform: Platform) -> bool:
    """Tell whether prompts are computed once: where it is asked for, or nothing else is and the platform was run."""
    wish = "prompts" if config.share == "auto" and platform.proven != "untested" else config.share
    return wish == "prompts" and config.layout == "thd"


def find_prompts(batch: TrainBatch, config: MegatronConfig, platform: Platform) -> Prompts | None:
    """Find the prompts of a batch that is on the host; None where none are to be shared, or no two are alike.

    Prompts are alike where every input, position, place within an image and image is. What was sampled may agree by
    chance too, and is nobody else's.
    """
    if not shares_prompts(config, platform):
        return None
    counts, numbers = _count_prompts(batch), np.empty(len(batch), np.int64)
    columns = [column.numpy() for column in (batch.inputs, batch.positions, batch.image_block) if column is not None]
    found: dict[object, int] = {}
    start = 0
    for row, (length, count) in enumerate(zip(batch.lengths, counts.tolist())):
        parts = [column[start : start + count] for column in columns]
        shown = batch.images[row] if batch.images and batch.image_block is not None else ()
        images = shown[: int(parts[-1].max(initial=-1)) + 1] if shown else ()
        key = (*(part.tobytes() for part in parts), *(image.digest for image in images)) if count else row
        numbers[row] = found.setdefault(key, len(found))
        start += length
    return Prompts(numbers, counts) if len(found) < len(batch) else None


def _count_prompts(batch: TrainBatch) -> np.ndarray:
    lengths = np.asarray(batch.lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    counted = np.flatnonzero(batch.mask.numpy())
    # Of each sequence its first counted target; where it has none, a later sequence's or the end of all.
    place = np.append(counted, len(batch.mask))[np.searchsorted(counted, starts)] - starts
    return np.where(place < lengths, place + 1, 0)
