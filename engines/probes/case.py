"""The sequences that masks are probed with, and the findings of a probe: plain data between controller and ranks."""

from dataclasses import dataclass, replace

import numpy as np

from hardware.attention.mask_spec import MaskSpec
from hardware.attention.rules import Rule


@dataclass(frozen=True)
class ProbeCase:
    """Sequences to probe with.

    Attributes:
        lengths: tokens of each sequence. columns: tokens of the stream that are changed to find their influence.
        image_block: ``[N]`` as ``TrainBatch`` has it. prefixes: tokens of each sequence's prefix.
    """

    lengths: tuple[int, ...]
    columns: tuple[int, ...]
    image_block: tuple[int, ...]
    prefixes: tuple[int, ...]

    def compute_visible(self, rule: Rule) -> np.ndarray:
        """Compute the oracle ``[N, N]`` bool: may token i see token j?"""
        blocks = np.asarray(self.image_block, dtype=np.int64)
        spec = MaskSpec("thd", self.lengths, self.lengths, rules=(rule,), image_block=blocks, prefixes=self.prefixes)
        return spec.compute_visible()[0].numpy()

    def passes(self, slots: int, sequences: int | None) -> list["ProbeCase"]:
        """Split the case by its columns, so that ``repeated`` of each part takes about ``slots``, of at most so many
        sequences."""
        # A column takes a copy of all sequences, each of which bshd makes as wide as the longest.
        count = slots // (len(self.lengths) * max(self.lengths))
        count = max(1, count if sequences is None else min(count, (sequences - 1) // len(self.lengths)))
        return [replace(self, columns=self.columns[i : i + count]) for i in range(0, len(self.columns), count)]

    def repeated(self) -> "ProbeCase":
        """Repeat the sequences, one copy for each column, all in one pack: ``[columns * N]`` tokens."""
        count = len(self.columns)
        return ProbeCase(self.lengths * count, self.columns, self.image_block * count, self.prefixes * count)

    @property
    def changed(self) -> list[int]:
        """Tokens ``[columns]`` of a repeated case: each column's token in its own copy."""
        size = sum(self.lengths) // len(self.columns)
        return [copy * size + column for copy, column in enumerate(self.columns)]

    def place(self) -> tuple[np.ndarray, np.ndarray]:
        """Place each token ``[N]``: its sequence, and its position in it."""
        positions = [np.arange(n) for n in self.lengths]
        return np.repeat(np.arange(len(self.lengths)), self.lengths), np.concatenate(positions)

    def judge(
        self, layer: int, effects: np.ndarray, allowed: np.ndarray, required: np.ndarray, pads: int
    ) -> "Influence":
        """Sort by kind the effects ``[N, columns]`` beyond the allowed, and the required effects that are missing."""
        sequence, position = self.place()
        leaks = {"padding": pads} if pads else {}
        words = [f"{pads} tokens see padding"] if pads else []
        for i, column in zip(*np.nonzero(effects & ~allowed)):
            j = self.columns[column]
            kind = self._classify_leak(int(i), int(j), sequence, position)
            leaks[kind] = leaks.get(kind, 0) + 1
            words.append(f"sequence {sequence[i]} at {position[i]} sees sequence {sequence[j]} at {position[j]}")
        missing = np.argwhere(required & ~effects)
        words += [
            f"sequence {sequence[i]} at {position[i]} does not see its own token at {position[self.columns[c]]}"
            for i, c in missing[:1]
        ]
        return Influence(layer, leaks, len(missing), words[0] if words else "")

    def _classify_leak(self, i: int, j: int, sequence: np.ndarray, position: np.ndarray) -> str:
        if sequence[i] != sequence[j]:
            return "a neighbour in the pack"
        if position[j] <= position[i]:
            return "outside the window or chunk"
        images = self.image_block
        return "across image blocks" if images[i] >= 0 and images[j] >= 0 else "the future"


@dataclass(frozen=True)
class Influence:
    """The influence in a layer that differs from the rule.

    Attributes:
        layer: number of the layer, from 1; 0 for the model as a whole.
        leaks: kind of leak -> pairs of tokens. missing: pairs that should see each other and do not.
        example: the first of them, in words.
    """

    layer: int
    leaks: dict[str, int]
    missing: int
    example: str
