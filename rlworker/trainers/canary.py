"""The canary: fixed tokens of which rollout engines and actor compute the logprobs from the same weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.batch.batch import TrainBatch
from engines.batch.samples import Sampling
from engines.batch.shard import get_logprobs
from engines.images import list_margins, make_columns
from engines.models.spec import ModelSpec
from rlworker.cluster.train_group import WorkerGroup
from rlworker.data.rows import Row
from rlworker.rollouts.manager import CANARY, RolloutManager
from rlworker.rollouts.trajectory import replay_support, to_batch
from rlworker.trainers.agreement import compare_logprobs

_CANARY_TOKENS = 64
"""Number of tokens that are scored after a weight sync."""
_SAMPLED_TOKENS = 4
"""Number of tokens that are sampled after an image, or where the context is too short to score text."""
_FLOOR_TOKENS = 256
"""Least number of tokens over which the floor is a mean, and most tokens of one text."""


@dataclass(frozen=True)
class Canary:
    """A comparison of rollout engines and actor on tokens whose logprobs both compute.

    Attributes:
        actor: the actor. manager: makes the sampling settings. model: description of the actor's model.
        rows: rows of the run, whose prompts are scored.
        engines: number of rollout engines.
        longest: most ids of a text.
    """

    actor: WorkerGroup
    manager: RolloutManager
    model: ModelSpec
    rows: Sequence[Row]
    engines: int
    longest: int

    def measure(self) -> dict[str, float]:
        """Measure ``compare_logprobs`` on 64 fixed tokens, or as many as ``longest`` allows.

        Where rows have images, tokens sampled after an image are compared too, so that the vision tower's weights
        count. Of the two results the larger is returned.
        """
        longest = min(self.longest, _CANARY_TOKENS + 1)
        texts = cut_texts(self._list_prompts(), _CANARY_TOKENS, longest, longest)
        parts = [self._compare(texts, scores_prompt=True)] if texts else []
        row = next((row for row in self.rows if row.images), None)
        if row or not parts:
            parts.append(self._compare([row or self.rows[0]], scores_prompt=False))
        names = {**parts[0], **parts[-1]}
        return {name: float(np.max([part.get(name, 0.0) for part in parts])) for name in names}  # NaN is the larger

    def measure_floor(self) -> float | None:
        """Measure the mean |rollout - trainer logprob| over 256 prompt tokens or more; None without such text."""
        texts = self._cut_floor_texts()
        return self._compare(texts, scores_prompt=True)["logprob_diff_mean"] if texts else None

    def measure_rounding(self) -> float | None:
        """Measure how far rounding alone moves the actor's logprobs of the floor's tokens; None without such text.

        The rollout engines take no part: a fault of theirs makes no limit wider.
        """
        texts = [row.prompt_ids for row in self._cut_floor_texts()]
        if not texts:
            return None
        columns = make_columns(texts, [()] * len(texts), self.model.vision)
        batch = TrainBatch.from_ids(texts, [1] * len(texts), **columns)
        ranks = self.actor.run("engines.probes.rounding:measure_rounding", batch)
        return next(mean for mean in ranks if mean is not None)

    def _cut_floor_texts(self) -> list[Row]:
        """Cut the texts of prompts that a floor is measured on."""
        return cut_texts(self._list_prompts(), _FLOOR_TOKENS, 2, min(self.longest, _FLOOR_TOKENS + 1))

    def _list_prompts(self) -> list[tuple[int, ...]]:
        """List the prompts' ids without those of images, which stand in no text."""
        special = {*self.model.banned_tokens, *list_margins(self.model)}
        return [tuple(token for token in row.prompt_ids if token not in special) for row in self.rows]

    def _compare(self, rows: Sequence[Row], scores_prompt: bool) -> dict[str, float]:
        # Enough of them that each engine and each replica has its share.
        asked: list[Row] = list(rows) * -(-self.engines * self.actor.dp_size // len(rows))
        sampling = self.manager.make_sampling(1, CANARY)
        if scores_prompt:
            sampling = Sampling(1, 1.0, 1, sampling.stream, (), scores_prompt=True)
        else:
            sampling = replace(sampling, max_tokens=min(_SAMPLED_TOKENS, sampling.max_tokens))
        completions = self.manager.loop.sample_each(asked, sampling)
        if scores_prompt:  # all but the first id count as what was sampled
            asked = [replace(row, prompt_ids=row.prompt_ids[:1]) for row in asked]
        batch = to_batch(asked, completions, [0.0] * len(asked), self.model.vision)
        if self.manager.config.rollout.top_k and not scores_prompt:
            batch = replay_support(batch)
        return compare_logprobs(batch, get_logprobs(self.actor.forward(batch, raw=scores_prompt)))


def cut_texts(prompts: Sequence[Sequence[int]], tokens: int, shortest: int, longest: int) -> list[Row]:
    """Cut as many texts from prompts as have ``tokens`` ids to score in all: each id of a text except its first.

    A text joins prompts, from the first again after the last, until it has ``shortest`` ids; it is cut at ``longest``.
    The list is empty if ``longest`` leaves no id to score.
    """
    prompts = [prompt for prompt in prompts if prompt]
    texts: list[Row] = []
    number = scored = 0
    while prompts and longest > 1 and scored < tokens:
        ids: list[int] = []
        while len(ids) < shortest:
            ids += prompts[number % len(prompts)]
            number += 1
        texts.append(Row("", tuple(ids[:longest]), "", {}))
        scored += len(texts[-1].prompt_ids) - 1
    return texts
