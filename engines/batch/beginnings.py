"""Find the common beginnings of a batch's sequences, on the host, by comparing everything that the model reads."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from engines.batch.batch import TrainBatch
from engines.config import MegatronConfig
from hardware.attention.mask_spec import Sharing
from hardware.platform import Platform


@dataclass(frozen=True)
class Beginnings:
    """Sequences in an order in which each has most in common with its neighbours.

    For ``a b c``, ``x y`` and ``a b d e`` it is ``order [0, 2, 1]`` and ``common [0, 2, 0]``. Any two sequences have in
    common the least of the numbers between them in the order: this table is a tree of beginnings.

    Attributes:
        order: ``[B]``, numbers of the sequences.
        common: ``[B]``, number of inputs that each sequence in the order has in common with the one before it.
        copied_slots: memory of a token's copy of keys and values in its sequence, in slots.
    """

    order: np.ndarray
    common: np.ndarray
    copied_slots: float = 0.0

    @cached_property
    def ranks(self) -> np.ndarray:
        """The place of each sequence in the order, ``[B]``."""
        return np.argsort(self.order)

    def share(self, rows: np.ndarray) -> Sharing | None:
        """Return which of a micro-batch's sequences ``rows`` ``[b]`` begin alike; None if no two do."""
        places = np.argsort(self.ranks[rows])
        ranks = self.ranks[rows][places].tolist()
        least = [0, *(int(self.common[left + 1 : right + 1].min()) for left, right in pairwise(ranks))]
        owners, counts = list(range(len(rows))), [0] * len(rows)
        path: list[tuple[int, int]] = []  # of the sequence before: where its parts begin, and the owner of each
        for place, count in zip(places.tolist(), least):
            while path and path[-1][0] >= count:
                path.pop()
            if count:
                owners[place], counts[place] = path[-1][1], count
            path.append((count, place))
        return Sharing(tuple(owners), tuple(counts)) if any(counts) else None


def choose_sharing(config: MegatronConfig, platform: Platform) -> str:
    """Return the beginnings that are computed once, "none", "prompts" or "tree", with "auto" resolved.

    "auto" is prompts with layout thd on a platform that shares them by default, else none.
    """
    if config.share == "auto":
        return "prompts" if platform.shares_prompts and config.layout == "thd" else "none"
    return config.share


def find_beginnings(
    batch: TrainBatch, config: MegatronConfig, platform: Platform, whole_images: bool = False
) -> Beginnings | None:
    """Find the common beginnings of the sequences of a batch on the host; None if nothing is to be shared, or no two
    begin alike.

    Beginnings are equal if every input, position, place within an image and image is. With ``prompts`` they end with
    the input that predicts the first counting target, and different prompts have nothing in common.

    Args:
        whole_images: whether no beginning may end within an image, since its tokens see each other both ways.
    """
    if (wish := choose_sharing(config, platform)) == "none" or config.layout != "thd":
        return None
    found = _find_prompts(batch) if wish == "prompts" else _find_tree(batch, whole_images)
    return found if found.common.any() else None


def group_prompts(numbers: np.ndarray, counts: np.ndarray) -> Beginnings:
    """Group sequences by the numbers ``[B]`` of their prompts, which have ``counts`` ``[B]`` inputs."""
    order = np.argsort(numbers, kind="stable")
    alike = np.append(False, numbers[order][1:] == numbers[order][:-1])
    return Beginnings(order, np.where(alike, counts[order], 0))


def _find_prompts(batch: TrainBatch) -> Beginnings:
    counts, numbers, parts = _count_prompts(batch), np.empty(len(batch), np.int64), _describe_inputs(batch)
    found: dict[object, int] = {}
    for row, count in enumerate(counts.tolist()):
        numbers[row] = found.setdefault(parts[row][:count].tobytes() if count else row, len(found))
    return group_prompts(numbers, counts)


def _count_prompts(batch: TrainBatch) -> np.ndarray:
    lengths = np.asarray(batch.lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    counted = np.flatnonzero(batch.mask.numpy())
    # Of each sequence its first counted target; where it has none, a later sequence's or the end of all.
    place = np.append(counted, len(batch.mask))[np.searchsorted(counted, starts)] - starts
    return np.where(place < lengths, place + 1, 0)


def _find_tree(batch: TrainBatch, whole_images: bool) -> Beginnings:
    parts = _describe_inputs(batch)
    order = sorted(range(len(parts)), key=lambda row: parts[row].tobytes())
    common = [0]
    for left, right in pairwise(order):
        count = min(len(parts[left]), len(parts[right]))
        differ = (parts[left][:count] != parts[right][:count]).any(1)
        count = int(differ.argmax()) if differ.any() else count
        for part in (parts[left], parts[right]) if whole_images else ():
            while 0 < count < len(part) and part[count, -1] >= 0 and part[count, -1] == part[count - 1, -1]:
                count -= 1
        common.append(count)
    return Beginnings(np.asarray(order), np.asarray(common))


def _describe_inputs(batch: TrainBatch) -> list[np.ndarray]:
    """Describe all that goes in at each place: per sequence ``[L, columns]``, ids, positions, and which image; alike up
    to a place where hidden states are."""
    columns = [batch.inputs.numpy()[:, None], batch.positions.numpy().reshape(len(batch.inputs), -1)]
    ends = np.cumsum(batch.lengths)
    if batch.image_block is not None:
        blocks, names, found = batch.image_block.numpy(), np.full(len(batch.inputs), -1), {}
        for row, shown in enumerate(batch.images or ()):
            part = slice(ends[row] - batch.lengths[row], ends[row])
            digests = [found.setdefault(image.digest, len(found)) for image in shown]
            if digests:
                names[part] = np.where(blocks[part] >= 0, np.asarray(digests)[blocks[part]], -1)
        columns += [names[:, None], blocks[:, None]]
    # Big-endian and never negative: bytes sort as numbers do.
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1).astype(">i8"))
    return np.split(rows, ends[:-1])
