"""The sequences of a probe and its findings, as plain data between controller and ranks."""

from dataclasses import dataclass, replace

import numpy as np

from hardware.attention.dense.oracle import compute_visible
from hardware.attention.mask_spec import MaskSpec
from hardware.attention.rules import Rule


@dataclass(frozen=True)
class ProbeCase:
    """Sequences to probe with.

    Attributes:
        lengths: number of tokens of each sequence. columns: numbers of the tokens whose influence the probe measures.
        image_block: ``[N]``, as in ``TrainBatch``. prefixes: length of each sequence's prefix.
    """

    lengths: tuple[int, ...]
    columns: tuple[int, ...]
    image_block: tuple[int, ...]
    prefixes: tuple[int, ...]

    def compute_visible(self, rule: Rule) -> np.ndarray:
        """Compute the oracle ``[N, N]`` bool: whether token i may see token j."""
        blocks = np.asarray(self.image_block, dtype=np.int64)
        spec = MaskSpec("thd", self.lengths, self.lengths, rules=(rule,), image_block=blocks, prefixes=self.prefixes)
        return compute_visible(spec)[0].numpy()

    def passes(self, slots: int, sequences: int | None) -> list["ProbeCase"]:
        """Split the case by its columns so that ``repeated`` of each part has about ``slots`` tokens.

        Args:
            sequences: most sequences of a part's ``repeated``; None sets no limit.
        """
        # A column takes a copy of all sequences, each of which bshd makes as wide as the longest.
        count = slots // (len(self.lengths) * max(self.lengths))
        count = max(1, count if sequences is None else min(count, (sequences - 1) // len(self.lengths)))
        return [replace(self, columns=self.columns[i : i + count]) for i in range(0, len(self.columns), count)]

    def repeated(self) -> "ProbeCase":
        """Return the sequences repeated once for each column, in one pack of ``columns * N`` tokens."""
        count = len(self.columns)
        return ProbeCase(self.lengths * count, self.columns, self.image_block * count, self.prefixes * count)

    @property
    def changed(self) -> list[int]:
        """Return the tokens ``[columns]`` to change in a repeated case: each column's token in its own copy."""
        size = sum(self.lengths) // len(self.columns)
        return [copy * size + column for copy, column in enumerate(self.columns)]

    def place(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sequence and position of each token, ``[N]`` each."""
        positions = [np.arange(n) for n in self.lengths]
        return np.repeat(np.arange(len(self.lengths)), self.lengths), np.concatenate(positions)

    def judge(
        self, layer: int, effects: np.ndarray, allowed: np.ndarray, required: np.ndarray, pads: int
    ) -> "Influence":
        """Sort the forbidden effects among ``[N, columns]`` by kind of leak, and count the missing required effects."""
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
    """The differences between the influence of tokens in a layer and the layer's rule.

    Attributes:
        layer: number of the layer, from 1; 0 for the model as a whole.
        leaks: kind of leak -> number of pairs of tokens. missing: number of pairs that should see each other and do
            not.
        example: description of the first pair.
    """

    layer: int
    leaks: dict[str, int]
    missing: int
    example: str
