"""Plain data of rollouts: images and videos, requests and completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from engines.batch.places import find_tokens

if TYPE_CHECKING:
    from engines.models.vision_spec import VisionSpec

_COPIES = 3
"""Number of copies of an image's patches in memory: transformers 5 resizes, normalises and cuts, each into new
memory."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image on disk.

    Attributes:
        path, digest: the image's file, and the SHA-256 of its content.
        size: width and height in pixels.
        grid: the patches that the processor makes: number of frames or tiles, and rows and columns of each.
        place: row and field of the image, for messages: ``data: train.jsonl, line 3, image 0``.
    """

    path: str
    digest: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    place: str

    @property
    def patches(self) -> int:
        """Number of patches in all frames or tiles."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def shown(self) -> int:
        """Number of pictures that are decoded."""
        return 1

    def tokens(self, merge: int) -> int:
        """Return the number of image tokens: ``merge`` x ``merge`` patches become one token."""
        return self.patches // merge**2

    def runs(self, vision: VisionSpec) -> list[tuple[int, int]]:
        """Return token and number of tokens of each run in a prompt, one run for each frame of a video."""
        return [(vision.image_token, self.tokens(vision.merge))]

    def nbytes(self, vision: VisionSpec) -> int:
        """Estimate the bytes that decoding takes: pixels, fp32 patches, and the processor's temporary arrays."""
        return 3 * self.shown * self.size[0] * self.size[1] + _COPIES * 4 * self.patches * vision.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled piece of text.

    Attributes:
        token_ids: ``[T]`` int32, sampled ids, the stop token included.
        logprobs: ``[T]`` float32, log-probability of each sampled id under the policy that sampled it, at the sampling
            temperature; ``[0]`` if it was sampled greedily.
        finished: True if a stop token ended it; False if it was cut at the length limit.
        spans: the weights that sampled it, in order: version, and number of ids that these weights sampled; at least
            one.
        top_ids, top_logprobs: ``[T, k]`` int32 and float32, the k likeliest ids at each place and their logprobs; id -1
            and -inf if fewer ids may be sampled. None if they were not requested.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finished: bool
    spans: tuple[tuple[int, int], ...]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sampled the last id."""
        return self.spans[-1][0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Completion) and Completions.join([self]) == Completions.join([other])


@dataclass(frozen=True, eq=False)
class Completions:
    """Many completions as columns, which cross process borders as a few arrays.

    ``[i]`` is a ``Completion`` and ``[i:j]`` are ``Completions``, both as views; ``[i:j:k]`` is a copy. Two are equal
    if all numbers are.

    Attributes:
        token_ids: ``[T]`` int32, ids of all completions end to end.
        logprobs: ``[T]`` float32, or ``[0]`` if all were sampled greedily.
        lengths: ``[n]`` int64, number of ids of each. finished: ``[n]`` bool.
        span_versions, span_lengths: ``[s]`` int64, version and number of ids of each span, all end to end.
        span_counts: ``[n]`` int64, number of spans of each.
        top_ids, top_logprobs: ``[T, k]``, as in ``Completion``; None if no completion has them.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    span_versions: np.ndarray
    span_lengths: np.ndarray
    span_counts: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @staticmethod
    def join(completions: Sequence[Completion]) -> Completions:
        """Join completions end to end.

        Raises:
            ValueError: only some have logprobs, or logprobs of the likeliest ids.
        """
        spans = [span for one in completions for span in one.spans]
        token_ids = _concatenate((one.token_ids for one in completions), np.int32)
        logprobs = _concatenate((one.logprobs for one in completions), np.float32)
        _check_logprobs(logprobs, token_ids)
        return Completions(
            token_ids,
            logprobs,
            np.asarray([len(one.token_ids) for one in completions], np.int64),
            np.asarray([one.finished for one in completions], bool),
            np.asarray([version for version, _ in spans], np.int64),
            np.asarray([length for _, length in spans], np.int64),
            np.asarray([len(one.spans) for one in completions], np.int64),
            *_concatenate_top(completions),
        )

    @staticmethod
    def concatenate(parts: Sequence[Completions]) -> Completions:
        """Join the completions of one part or more end to end.

        Raises:
            ValueError: only some have logprobs, or logprobs of the likeliest ids.
        """
        names = [column.name for column in fields(Completions) if not column.name.startswith("top_")]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        _check_logprobs(columns["logprobs"], columns["token_ids"])
        top_ids, top_logprobs = _concatenate_top([part for part in parts if len(part)])
        return Completions(**columns, top_ids=top_ids, top_logprobs=top_logprobs)

    def gather(self, rows: np.ndarray) -> Completions:
        """Return the completions with the numbers ``rows`` ``[m]``, in that order, as copies."""
        return self._pick(find_tokens(self.lengths, rows), find_tokens(self.span_counts, rows), rows)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> Completions: ...
    def __getitem__(self, index: int | slice) -> Completion | Completions:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._cut(start, max(start, stop)) if step == 1 else self.gather(np.arange(start, stop, step))
        number = range(len(self))[index]  # a negative one counts from the end; IndexError past either
        one = self._cut(number, number + 1)
        spans = zip(one.span_versions.tolist(), one.span_lengths.tolist(), strict=True)
        return Completion(
            one.token_ids, one.logprobs, bool(one.finished[0]), tuple(spans), one.top_ids, one.top_logprobs
        )

    def __iter__(self) -> Iterator[Completion]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Completions) and all(
            np.array_equal(getattr(self, column.name), getattr(other, column.name)) for column in fields(self)
        )

    def _cut(self, start: int, stop: int) -> Completions:
        """Cut out completions ``start`` to ``stop``, as views."""
        tokens, spans = (slice(*bounds[[start, stop]]) for bounds in (self._token_bounds, self._span_bounds))
        return self._pick(tokens, spans, slice(start, stop))

    def _pick(self, tokens: Any, spans: Any, rows: Any) -> Completions:
        """Pick completions by the places of their ids, of their spans, and their own."""
        return Completions(
            self.token_ids[tokens],
            self.logprobs[tokens] if len(self.logprobs) else self.logprobs,
            self.lengths[rows],
            self.finished[rows],
            self.span_versions[spans],
            self.span_lengths[spans],
            self.span_counts[rows],
            *(None if column is None else column[tokens] for column in (self.top_ids, self.top_logprobs)),
        )

    @cached_property
    def _token_bounds(self) -> np.ndarray:
        """``[n + 1]``, where the ids of each completion begin, and the end of all."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def _span_bounds(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.span_counts)])


def _concatenate(parts: Iterable[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)  # of no part it is empty


def _concatenate_top(
    parts: Sequence[Completion] | Sequence[Completions],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Lay the likeliest ids and their logprobs end to end; None where no part has any."""
    found = [(part.top_ids, part.top_logprobs) for part in parts if part.top_ids is not None]
    if len(found) not in (0, len(parts)):
        raise ValueError(
            f"completions: {len(found)} of {len(parts)} parts have the logprobs of the likeliest ids, expected all or "
            "none; draw all completions of a round with the same top_logprobs"
        )
    if not found:
        return None, None
    ids, logprobs = zip(*found, strict=True)
    return np.concatenate(ids), np.concatenate(logprobs)


def _check_logprobs(logprobs: np.ndarray, token_ids: np.ndarray) -> None:
    if len(logprobs) not in (0, len(token_ids)):
        raise ValueError(
            f"completions: {len(token_ids)} sampled ids and logprobs of {len(logprobs)}, expected of all or of none; "
            "draw all completions of a round greedily or none"
        )


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling completions.

    Attributes:
        count: completions per prompt. temperature: 0 is greedy. max_tokens: most tokens of a completion.
        stream: seed of the random numbers. Samples repeat for the same stream, weights and prompts; different streams
            are independent.
        stop_token_ids: a completion ends with the first of these ids, and includes it.
        expected_tokens: expected length of a completion, by which prompts are divided over engines.
        top_logprobs: k, the number of likeliest ids whose logprobs come with each sampled id. Samples do not depend on
            it, and greedy samples come without.
        scores_prompt: score instead of sample: the completion is the prompt's own ids from the second on, with logprobs
            at temperature 1 and without banned ids.
    """

    count: int
    temperature: float
    max_tokens: int
    stream: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    expected_tokens: float = 0.0
    top_logprobs: int = 0
    scores_prompt: bool = False

    @property
    def seed(self) -> int:
        """Seed that is made from ``stream``."""
        return make_seed(self.stream)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the completions of one prompt.

    Attributes:
        token_ids: ids of the prompt, with as many image tokens as the model sees.
        sampling: settings for the completions.
        images: images and videos of the prompt, in order.
        goes_first: whether it is sampled before all requests that have not begun, if an engine samples ahead of the
            trainer.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    images: tuple[Image, ...] = ()
    goes_first: bool = False


def make_seed(stream: tuple[int, ...]) -> int:
    """Hash the numbers of a stream to a seed of 64 bits, so that streams do not overlap."""
    return int(np.random.SeedSequence(stream).generate_state(1, np.uint64)[0])
