"""The batch that a training step learns from: B sequences as one flat stream of N tokens, without padding."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from engines.batch.places import count_up, drop_firsts, drop_lasts, find_tokens
from engines.batch.samples import Image
from hardware.transfer import to_device


@dataclass(frozen=True)
class Column:
    """All that code knows of a column of a batch: a new one is stated here, and its readers read it.

    Attributes:
        kind: "input" or "target" with N entries, or "sequence" with B.
        dims: number of its dimensions; an input column may have any.
        sampled: attribute of ``Completion`` with its entries at the sampled ids; empty for a column of another source.
        blank: its entry at all other targets.
        of_likeliest: whether only losses over the sampler's likeliest ids read it, so that other engines do without.
    """

    kind: Literal["input", "target", "sequence"]
    dims: int = 1
    sampled: str = ""
    blank: float = 0
    of_likeliest: bool = False


def _column(*settings: Any, **named: Any) -> Any:
    return field(default=None, metadata={"column": Column(*settings, **named)})


@dataclass(frozen=True)
class TrainBatch:
    """Sequences laid end to end: sequence i owns ``lengths[i]`` consecutive entries of every token column.

    Inputs and targets are shifted once, when the batch is made: ``inputs = ids[:-1]`` and ``targets = ids[1:]``. Entry
    n of an input column belongs to the input token, and entry n of a target column to the token predicted from it.
    Later code never shifts. ``from_ids([[7, 8, 9], [4, 5]], prompt_lengths=[2, 1])`` has B = 2 and N = 3::

        lengths (2, 1)
        inputs  [7, 8,  4]      positions [0, 1,  0]
        targets [8, 9,  5]      mask      [False, True,  True]

    Columns (``COLUMNS`` has the kind): *input* and *target* columns hold N entries, *sequence* columns hold B. An entry
    is a number, but for positions and the columns whose ``dims`` are 2.

    Attributes:
        lengths: inputs per sequence; a sequence of L ids has L - 1.
        inputs, positions: ``[N]`` long, the input token and its position in its own sequence; positions are ``[N, 3]``
            (time, height, width) for models that use them (``engines.images.columns``).
        image_block: ``[N]`` long, number of the image in its sequence that an input belongs to, -1 for text; it stays
            in the host's memory.
        images: the images of each sequence, in order; None for a batch without images.
        targets: ``[N]`` long. mask: ``[N]`` bool, the target was sampled by the policy and counts in the loss.
        routes: ``[N, layers, k]`` int16, the experts that the rollout engine computed the input by, in each layer; -1
            where a layer has none, or none are known.
        rollout_logprobs, old_logprobs, ref_logprobs, advantages: ``[N]`` float32, of the target.
        support: ``[N, k]`` int32, ids that could be sampled at the target, -1 for none; where all are -1, every id. A
            language model's outputs are of the distribution over these.
        rollout_top_ids: ``[N, k]`` int32, the sampler's k likeliest ids at a sampled target, -1 elsewhere.
        rollout_top_logprobs: ``[N, k]`` float32, their logprobs, -inf elsewhere.
        old_top_logprobs: ``[N, k + 1]`` float32, the old policy's logprobs of these ids, and last of all other ids
            together. ref_top_logprobs: the reference's or teacher's of the same.
        values, returns: ``[N]`` float32, the critic's value of the prefix that ends at the input, and the target of
            that value. penalties: ``[N]`` float32, part of the reward that is given at the target.
        weights: ``[N]`` float32, weight of the target's loss; None takes the mask.
        versions: ``[N]`` int32, version of the weights that sampled the target, -1 where it was not sampled.
        turn: ``[N]`` int32, the turn of its episode that sampled the target, from 0 on, -1 where it was not sampled;
            None: each sequence is one turn. turn_rewards: ``[N]`` float32, reward given at the target, added to
            ``rewards``.
        rewards, group: ``[B]``: reward that is given at the sequence's last counting token; number of the prompt.
        greedy_rewards: ``[B]``, reward of the greedy completion of the same prompt.
        episode: ``[B]`` long, number of the episode; its sequences follow one another. None: each sequence is one.

    Raises:
        ValueError: a column does not have the length of its kind.
    """

    lengths: tuple[int, ...]
    inputs: Tensor = _column("input")
    positions: Tensor = _column("input")
    targets: Tensor = _column("target")
    mask: Tensor = _column("target")
    image_block: Tensor | None = _column("input")
    routes: Tensor | None = _column("input")
    rollout_logprobs: Tensor | None = _column("target", sampled="logprobs")
    old_logprobs: Tensor | None = _column("target")
    ref_logprobs: Tensor | None = _column("target")
    support: Tensor | None = _column("target", dims=2)
    rollout_top_ids: Tensor | None = _column("target", 2, "top_ids", -1, of_likeliest=True)
    rollout_top_logprobs: Tensor | None = _column("target", 2, "top_logprobs", -np.inf, of_likeliest=True)
    old_top_logprobs: Tensor | None = _column("target", dims=2, of_likeliest=True)
    ref_top_logprobs: Tensor | None = _column("target", dims=2, of_likeliest=True)
    advantages: Tensor | None = _column("target")
    values: Tensor | None = _column("target")
    returns: Tensor | None = _column("target")
    penalties: Tensor | None = _column("target")
    weights: Tensor | None = _column("target")
    versions: Tensor | None = _column("target")
    turn: Tensor | None = _column("target")
    turn_rewards: Tensor | None = _column("target")
    rewards: Tensor | None = _column("sequence")
    group: Tensor | None = _column("sequence")
    greedy_rewards: Tensor | None = _column("sequence")
    episode: Tensor | None = _column("sequence")
    images: tuple[tuple[Image, ...], ...] | None = None

    def __post_init__(self):
        tokens = sum(self.lengths)
        if self.images is not None and len(self.images) != len(self.lengths):
            raise ValueError(f"TrainBatch: images of {len(self.images)} sequences, the batch has {len(self.lengths)}")
        for name, about in COLUMNS.items():
            column = getattr(self, name)
            entries, unit = (len(self.lengths), "sequences") if about.kind == "sequence" else (tokens, "tokens")
            if column is None:
                continue
            if len(column) != entries:
                raise ValueError(f"TrainBatch: {name} has {len(column)} entries, the batch has {entries} {unit}")
            if about.kind != "input" and column.dim() != about.dims:  # it would broadcast against others to a square
                expected = f"[{entries}]" if about.dims == 1 else f"[{entries}, k]"
                raise ValueError(f"TrainBatch: {name} has shape {tuple(column.shape)}, expected {expected}")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N, the number of entries of a token column."""
        return sum(self.lengths)

    def require_column(self, name: str) -> Tensor:
        """Return a column that the caller needs.

        Raises:
            ValueError: the batch does not have the column.
        """
        if (column := getattr(self, name)) is None:
            raise ValueError(f"TrainBatch: it has no column {name}, which is needed; add it by dataclasses.replace")
        return column

    @classmethod
    def from_ids(
        cls,
        sequences: Sequence[Sequence[int] | np.ndarray],
        prompt_lengths: Sequence[int] | None = None,
        *,
        sampled: Sequence[Sequence[bool] | np.ndarray] | None = None,
        **columns,
    ) -> "TrainBatch":
        """Make a batch of whole sequences, in which the sampled targets count.

        Args:
            sequences: ids of each sequence, prompt and everything after it together.
            prompt_lengths: number of prompt ids of each sequence; every id after them was sampled.
            sampled: instead of ``prompt_lengths``, for each id of each sequence whether it was sampled.
            columns: further columns, by the names of the attributes.

        Raises:
            ValueError: a sequence has no id, a prompt is empty or longer than its sequence, or ``sampled`` does not
                have one entry for each id or has the first id, which nothing predicts.
        """
        sizes = np.asarray([len(ids) for ids in sequences], dtype=np.int64)
        if (prompt_lengths is None) == (sampled is None):
            raise ValueError("TrainBatch: give either prompt_lengths or sampled, which says which targets count")
        if prompt_lengths is not None:
            for i, (size, prompt) in enumerate(zip(sizes.tolist(), prompt_lengths, strict=True)):
                if not 0 < prompt <= size:
                    raise ValueError(f"TrainBatch: sequence {i} has {size} ids and a prompt of {prompt}, expected 1..")
            counts = np.stack([np.asarray(prompt_lengths, dtype=np.int64), sizes - prompt_lengths], axis=1)  # [B, 2]
            was_sampled = np.repeat(np.tile([False, True], len(sizes)), counts.reshape(-1))
        else:
            assert sampled is not None
            for i, (size, marks) in enumerate(zip(sizes.tolist(), sampled, strict=True)):
                if not 0 < size == len(marks) or marks[0]:
                    raise ValueError(
                        f"TrainBatch: sequence {i} has {size} ids and {len(marks)} entries in sampled, expected "
                        "at least one id and as many entries, the first False"
                    )
            was_sampled = np.concatenate([np.asarray(marks, dtype=bool) for marks in sampled])
        flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences])
        return cls.from_stream(flat, sizes, was_sampled, **columns)

    @classmethod
    def from_stream(cls, token_ids: np.ndarray, sizes: np.ndarray, sampled: np.ndarray, **columns) -> "TrainBatch":
        """Make a batch of sequences that are laid end to end.

        Args:
            token_ids: ``[N + B]`` whole numbers. sizes: ``[B]``, number of ids of each sequence, at least 1.
            sampled: ``[N + B]`` bool, whether the id was sampled; never a sequence's first.
            columns: further columns, by the names of the attributes.
        """
        # The shift: inputs leave out each sequence's last id and targets each one's first.
        lengths = np.asarray(sizes, dtype=np.int64) - 1
        arrays = {
            "inputs": drop_lasts(token_ids, sizes).astype(np.int64),
            "targets": drop_firsts(token_ids, sizes).astype(np.int64),
            "positions": count_up(lengths),
            "mask": drop_firsts(sampled, sizes),
        }
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(tuple(lengths.tolist()), **tensors | columns)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns that are present: name -> ``[N]``, ``[N, 3]``, ``[N, k]`` or ``[B]``."""
        return {name: getattr(self, name) for name in COLUMNS if getattr(self, name) is not None}

    def repeat_per_token(self, per_sequence: Tensor) -> Tensor:
        """Repeat one value per sequence over its tokens: ``[B] -> [N]``."""
        lengths = to_device(torch.tensor(self.lengths), per_sequence.device)
        return per_sequence.repeat_interleave(lengths, output_size=self.num_tokens)

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        """Sum over each sequence's tokens: ``[N] -> [B]``."""
        sequence = self.repeat_per_token(torch.arange(len(self), device=per_token.device))
        return per_token.new_zeros(len(self)).index_add(0, sequence, per_token)

    @property
    def num_episodes(self) -> int:
        """E, the number of episodes of the batch."""
        return len(self) if self.episode is None else int(self.number_episodes().max()) + 1

    def number_episodes(self) -> Tensor:
        """Return the number of each sequence's episode, from 0 on in order, ``[B]`` long.

        Raises:
            ValueError: sequences of an episode do not follow one another.
        """
        if self.episode is None:
            return torch.arange(len(self))
        begins = torch.ones(len(self), dtype=torch.bool)
        begins[1:] = self.episode[1:] != self.episode[:-1]
        if int(begins.sum()) != len(self.episode.unique()):
            raise ValueError("TrainBatch: sequences of an episode do not follow one another; lay them end to end")
        return begins.cumsum(0) - 1

    def sum_per_episode(self, per_sequence: Tensor) -> Tensor:
        """Sum over the sequences of each episode: ``[B] -> [E]``."""
        if self.episode is None:
            return per_sequence
        return per_sequence.new_zeros(self.num_episodes).index_add(0, self.number_episodes(), per_sequence)

    def select(self, start: int, stop: int) -> "TrainBatch":
        """Return the sequences ``start`` to ``stop`` (exclusive), as views of this batch's columns."""
        return self.cut([start, stop])[0]

    def cut(self, bounds: Sequence[int] | np.ndarray) -> list["TrainBatch"]:
        """Return the sequences between each two neighbours of ``bounds`` as a batch of views of this batch's
        columns."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])  # [B + 1], tokens before each sequence
        rows, tokens = ([slice(*pair) for pair in pairwise(map(int, edges))] for edges in (bounds, ends[bounds]))
        columns, parts = self.columns(), []
        for row, token in zip(rows, tokens, strict=True):
            views = {
                name: column[row if COLUMNS[name].kind == "sequence" else token] for name, column in columns.items()
            }
            images = None if self.images is None else self.images[row]
            parts.append(replace(self, lengths=self.lengths[row], images=images, **views))
        return parts

    def gather(self, rows: np.ndarray) -> "TrainBatch":
        """Return the sequences with the numbers ``rows`` ``[b]``, in that order, as copies."""
        if np.array_equal(rows, np.arange(len(self))):
            return self
        sequences, tokens = torch.from_numpy(rows), torch.from_numpy(find_tokens(self.lengths, rows))
        gathered = {
            name: column.index_select(0, sequences if COLUMNS[name].kind == "sequence" else tokens)
            for name, column in self.columns().items()
        }
        images = None if self.images is None else tuple(self.images[row] for row in rows)
        return replace(self, lengths=tuple(np.asarray(self.lengths)[rows].tolist()), images=images, **gathered)

    def split(self, parts: int) -> list["TrainBatch"]:
        """Split into ``parts`` runs of consecutive episodes, with counts as equal as possible.

        Raises:
            ValueError: there are fewer episodes than parts.
        """
        count, kind = self.num_episodes, "sequences" if self.episode is None else "episodes"
        if count < parts:
            raise ValueError(f"TrainBatch: {count} {kind} cannot be split over {parts} parts; use more {kind}")
        # [E + 1], sequences before each episode.
        starts = np.searchsorted(self.number_episodes().numpy(), np.arange(count + 1))
        return self.cut(starts[[count * i // parts for i in range(parts + 1)]])

    def to(self, device: torch.device) -> "TrainBatch":
        """Copy the batch to ``device``, except for columns that only the host reads, to make plans."""
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


COLUMNS: dict[str, Column] = {f.name: f.metadata["column"] for f in fields(TrainBatch) if "column" in f.metadata}
"""Name of a column -> what is known of it."""
