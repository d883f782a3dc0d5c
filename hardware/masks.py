"""Who may see whom, as data.

A ``MaskSpec`` names a rule and decides nothing: a platform lowers it to what its attention kernels honour
(``Platform.attention_inputs``), and ``MaskSpec.visible`` is the dense oracle that every lowering is tested against.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

LayoutKind = Literal["bshd", "thd"]


def zigzag_positions(padded: int, cp: int, cp_rank: int) -> np.ndarray:
    """Positions of one padded sequence that a context-parallel rank holds, in the order it holds them.

    The sequence is cut into ``2 * cp`` chunks and rank r takes chunks r and ``2 * cp - 1 - r``, so that every rank does
    the same amount of causal work (Llama 3 report, section 3.3.2). With ``padded=8, cp=2`` rank 0 holds
    ``[0, 1, 6, 7]`` and rank 1 holds ``[2, 3, 4, 5]``.
    """
    if cp == 1:
        return np.arange(padded)
    chunks = np.arange(padded).reshape(2 * cp, -1)
    return np.concatenate([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])


def slot_places(padded: tuple[int, ...], cp: int, cp_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence number and position of every slot of a context-parallel rank, sequences one after another.

    Args:
        padded: length of each sequence with its padding, over all ranks; a multiple of ``2 * cp`` when ``cp > 1``.

    Returns:
        ``(sequence, position)``, both ``[sum(padded) / cp]``; a position past the sequence's end is padding.
    """
    total = np.asarray(padded, dtype=np.int64)
    local = total // cp
    sequence = np.repeat(np.arange(len(total)), local)
    within = np.arange(int(local.sum())) - np.repeat(np.cumsum(local) - local, local)
    if cp == 1:
        return sequence, within
    chunk = np.repeat(total // (2 * cp), local)
    low = within < chunk
    return sequence, np.where(low, cp_rank * chunk + within, (2 * cp - 1 - cp_rank) * chunk + within - chunk)


@dataclass(frozen=True)
class MaskSpec:
    """The attention rule of one micro-batch, as one context-parallel rank must apply it.

    Attributes:
        kind: ``"bshd"`` (one row per sequence) or ``"thd"`` (all sequences end to end in one row).
        lengths: real tokens of each sequence.
        padded: slots of each sequence over all context-parallel ranks; all equal for bshd.
        cp, cp_rank: context-parallel size and this rank's place in it (zigzag order).
        windows: sliding window per layer, counting the tokens seen *including oneself*; ``None`` sees the whole past.
            A tuple of one holds for every layer.

    Every rule is causal and stays within its own sequence.
    """

    kind: LayoutKind
    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    cp: int = 1
    cp_rank: int = 0
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self):
        if len(self.lengths) != len(self.padded):
            raise ValueError(f"MaskSpec: {len(self.lengths)} lengths but {len(self.padded)} padded lengths")
        if any(n > p for n, p in zip(self.lengths, self.padded)):
            raise ValueError("MaskSpec: a sequence is longer than its padded length")
        if self.kind == "bshd" and len(set(self.padded)) > 1:
            raise ValueError(f"MaskSpec: bshd rows must be padded to one length, got {sorted(set(self.padded))}")
        if self.cp > 1 and any(p % (2 * self.cp) for p in self.padded):
            raise ValueError(f"MaskSpec: padded lengths must be multiples of 2*cp = {2 * self.cp}, got {self.padded}")
        bad = [w for w in self.windows if w is not None and w < 1]
        if bad or not self.windows:
            raise ValueError(f"MaskSpec: a window counts the token itself and so is at least 1, got {self.windows}")

    def window(self, layer_number: int) -> int | None:
        """Window of a layer; ``layer_number`` counts from 1 over the whole model, as Megatron's does."""
        return self.windows[0] if len(self.windows) == 1 else self.windows[layer_number - 1]

    def places(self, cp_rank: int) -> tuple[Tensor, Tensor]:
        """``(segment, position)`` of a rank's slots, both ``[b, s]``; the segment of a padding slot is -1."""
        sequence, position = slot_places(self.padded, self.cp, cp_rank)
        segment = np.where(position < np.asarray(self.lengths, dtype=np.int64)[sequence], sequence, -1)
        rows = len(self.padded) if self.kind == "bshd" else 1
        return tuple(torch.from_numpy(x.reshape(rows, -1)) for x in (segment, position))

    def visible(self, layer_number: int = 1) -> Tensor:
        """The dense oracle ``[b, s, cp * s]``: True where this rank's query slot may see a key slot.

        Keys are in rank order, as a gather over the context-parallel group delivers them. A padding slot sees nothing
        and is seen by nobody. Quadratic in the micro-batch: for tests and probes, never for training.
        """
        segment, position = self.places(self.cp_rank)
        keys = [self.places(rank) for rank in range(self.cp)]
        key_segment, key_position = (torch.cat([k[i] for k in keys], dim=1) for i in range(2))
        distance = position[:, :, None] - key_position[:, None, :]
        see = (segment[:, :, None] == key_segment[:, None, :]) & (segment[:, :, None] >= 0) & (distance >= 0)
        window = self.window(layer_number)
        return see if window is None else see & (distance < window)
