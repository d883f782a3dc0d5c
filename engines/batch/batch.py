"""What a training step learns from: B sequences as one flat stream of N tokens, without padding."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.batch.samples import Image
from hardware.transfer import to_device


def _column(kind: str, default: Any = None) -> Any:
    return field(default=default, metadata={"column": kind})


@dataclass(frozen=True)
class TrainBatch:
    """Sequences laid end to end: sequence i owns ``lengths[i]`` consecutive entries of every token column.

    The one shift happens here, when the batch is born: ``inputs = ids[:-1]`` and ``targets = ids[1:]``, so entry n of
    an input column belongs to the token that goes in and entry n of a target column to the token predicted from it.
    Nothing downstream shifts again. The ids ``[7, 8, 9]`` with prompt ``[7]`` become::

        inputs  [7, 8]      positions [0, 1]
        targets [8, 9]      mask      [True, True]

    Columns (metadata names the kind): *input* and *target* columns hold N entries, *sequence* columns hold B.

    Attributes:
        lengths: inputs per sequence; a sequence of L ids has L - 1.
        inputs, positions: ``[N]`` long, what goes in and its place in its own sequence; positions ``[N, 3]`` in time,
            height and width where the model has them (``engines.images.columns``).
        image_block: ``[N]`` long, which image of its sequence an input belongs to, -1 for text; it stays in the
            host's memory.
        images: those of each sequence, in their order; None where there are none.
        targets: ``[N]`` long. mask: ``[N]`` bool, the target was sampled by the policy and counts in the loss.
        rollout_logprobs, old_logprobs, ref_logprobs, advantages: ``[N]`` float32, of the target.
        values, returns: ``[N]`` float32, the critic's value of the prefix that ends at the input, and what it should
            have been. penalties: ``[N]`` float32, part of the reward that is given at the target.
        weights: ``[N]`` float32, how much the target's loss counts; None counts the mask.
        rewards, group, versions: ``[B]``: reward, number of the prompt, version of the weights that sampled it.
        greedy_rewards: ``[B]``, reward of the greedy completion of the same prompt.

    Raises:
        ValueError: a column does not have the length of its kind.
    """

    lengths: tuple[int, ...]
    inputs: Tensor = _column("input")
    positions: Tensor = _column("input")
    targets: Tensor = _column("target")
    mask: Tensor = _column("target")
    image_block: Tensor | None = _column("input")
    rollout_logprobs: Tensor | None = _column("target")
    old_logprobs: Tensor | None = _column("target")
    ref_logprobs: Tensor | None = _column("target")
    advantages: Tensor | None = _column("target")
    values: Tensor | None = _column("target")
    returns: Tensor | None = _column("target")
    penalties: Tensor | None = _column("target")
    weights: Tensor | None = _column("target")
    rewards: Tensor | None = _column("sequence")
    group: Tensor | None = _column("sequence")
    versions: Tensor | None = _column("sequence")
    greedy_rewards: Tensor | None = _column("sequence")
    images: tuple[tuple[Image, ...], ...] | None = None

    def __post_init__(self):
        tokens = sum(self.lengths)
        if self.images is not None and len(self.images) != len(self.lengths):
            raise ValueError(f"TrainBatch: images of {len(self.images)} sequences, the batch has {len(self.lengths)}")
        for name, kind in COLUMNS.items():
            column = getattr(self, name)
            wanted, unit = (len(self.lengths), "sequences") if kind == "sequence" else (tokens, "tokens")
            if column is None:
                continue
            if len(column) != wanted:
                raise ValueError(f"TrainBatch: {name} has {len(column)} entries, the batch has {wanted} {unit}")
            if column.dim() > 1 and kind != "input":  # it would broadcast against the others to a square
                raise ValueError(f"TrainBatch: {name} has shape {tuple(column.shape)}, expected [{wanted}]")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def from_ids(cls, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], **columns) -> "TrainBatch":
        """Cut inputs and targets from whole sequences; the tokens after each prompt are the ones that count.

        Args:
            sequences: prompt and completion ids of each sequence, together.
            prompt_lengths: how many of them are prompt; targets at or past this place have ``mask=True``.
            columns: further columns, as the class names them.

        Raises:
            ValueError: a sequence has no id, or a prompt is empty or longer than its sequence.
        """
        for i, (ids, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            if not 0 < prompt <= len(ids):
                raise ValueError(f"TrainBatch: sequence {i} has {len(ids)} ids and a prompt of {prompt}, expected 1..")
        sizes = np.asarray([len(ids) for ids in sequences], dtype=np.int64)
        flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences])
        ends = np.cumsum(sizes)
        is_last, is_first = np.zeros(len(flat), bool), np.zeros(len(flat), bool)
        is_last[ends - 1] = is_first[ends - sizes] = True
        lengths = sizes - 1
        positions = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        mask = positions + 1 >= np.repeat(np.asarray(prompt_lengths), lengths)
        tensors = {"inputs": flat[~is_last], "targets": flat[~is_first], "positions": positions, "mask": mask}
        return cls(tuple(lengths.tolist()), **{k: torch.from_numpy(v) for k, v in tensors.items()} | columns)

    def columns(self) -> dict[str, Tensor]:
        """The columns that are present, by name."""
        return {name: getattr(self, name) for name in COLUMNS if getattr(self, name) is not None}

    def per_token(self, per_sequence: Tensor) -> Tensor:
        """Repeat one value per sequence over its tokens: ``[B] -> [N]``."""
        lengths = to_device(torch.tensor(self.lengths), per_sequence.device)
        return per_sequence.repeat_interleave(lengths, output_size=self.num_tokens)

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        """Add up each sequence's tokens: ``[N] -> [B]``."""
        sequence = self.per_token(torch.arange(len(self), device=per_token.device))
        return per_token.new_zeros(len(self)).index_add(0, sequence, per_token)

    def select(self, start: int, stop: int) -> "TrainBatch":
        """Sequences ``start`` to ``stop``, as views of this batch's columns."""
        first, last = sum(self.lengths[:start]), sum(self.lengths[:stop])
        cut = {
            name: column[start:stop] if COLUMNS[name] == "sequence" else column[first:last]
            for name, column in self.columns().items()
        }
        images = None if self.images is None else self.images[start:stop]
        return replace(self, lengths=self.lengths[start:stop], images=images, **cut)

    def take(self, rows: np.ndarray) -> "TrainBatch":
        """The sequences of these numbers, in this order."""
        if np.array_equal(rows, np.arange(len(self))):
            return self
        sequences, tokens = torch.from_numpy(rows), torch.from_numpy(token_numbers(self.lengths, rows))
        taken = {
            name: column.index_select(0, sequences if COLUMNS[name] == "sequence" else tokens)
            for name, column in self.columns().items()
        }
        images = None if self.images is None else tuple(self.images[row] for row in rows)
        return replace(self, lengths=tuple(np.asarray(self.lengths)[rows].tolist()), images=images, **taken)

    def split(self, parts: int) -> list["TrainBatch"]:
        """``parts`` runs of consecutive sequences of as equal count as possible.

        Raises:
            ValueError: there are fewer sequences than parts.
        """
        if len(self) < parts:
            raise ValueError(
                f"TrainBatch: {len(self)} sequences cannot be split over {parts} parts; use more sequences"
            )
        bounds = [len(self) * i // parts for i in range(parts + 1)]
        return [self.select(a, b) for a, b in zip(bounds, bounds[1:])]

    def to(self, device: torch.device) -> "TrainBatch":
        """The same batch with its columns on ``device``, all but what only plans are made of, which the host makes."""
        moved = {name: to_device(column, device) for name, column in self.columns().items() if name != "image_block"}
        return replace(self, **moved)

    # Numpy arrays cross process borders without a copy; a torch view would pickle the storage it looks into.
    def __getstate__(self) -> dict:
        arrays = {name: np.ascontiguousarray(column.cpu().numpy()) for name, column in self.columns().items()}
        return {"lengths": self.lengths, "images": self.images, **arrays}

    def __setstate__(self, state: dict) -> None:
        with warnings.catch_warnings():  # torch warns that shared memory is read-only; columns are never written
            warnings.simplefilter("ignore", UserWarning)
            for name in COLUMNS:
                array = state.get(name)
                object.__setattr__(self, name, None if array is None else torch.from_numpy(array))
        object.__setattr__(self, "lengths", state["lengths"])
        object.__setattr__(self, "images", state["images"])


def token_numbers(lengths: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """Where the tokens of these sequences stand in a stream of sequences of ``lengths``, one sequence after another."""
    sizes = np.asarray(lengths, dtype=np.int64)
    taken = sizes[rows]
    shift = (np.cumsum(sizes) - sizes)[rows] - (np.cumsum(taken) - taken)
    return np.arange(taken.sum()) + np.repeat(shift, taken)


COLUMNS: dict[str, str] = {f.name: f.metadata["column"] for f in fields(TrainBatch) if "column" in f.metadata}
"""Name of every column -> its kind: "input", "target" or "sequence"."""
