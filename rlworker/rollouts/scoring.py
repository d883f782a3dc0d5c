"""The rewards of what was sampled."""

from collections.abc import Sequence
from copy import copy
from typing import Any

from engines.batch.samples import Completions
from rlworker.data.rows import Row
from rlworker.rewards.pool import RewardPool, Scores
from rlworker.rollouts.to_batch import PromptGroup


def score_completions(
    tokenizer: Any, rewards: RewardPool, rows: Sequence[Row], completions: Completions
) -> tuple[list[PromptGroup], Scores]:
    """Find the texts and rewards of the completions ``[P * G]`` of some rows ``[P]``."""
    size, ids = len(completions) // len(rows), [sample.token_ids.tolist() for sample in completions]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    # Of a row that comes twice each group has its own, which a batch reward is called for.
    scores = rewards.score(texts, [own for row in rows for own in [copy(row)] * size])
    cuts = [slice(i * size, (i + 1) * size) for i in range(len(rows))]
    parts = zip(rows, cuts, strict=True)
    return [PromptGroup(row, completions[cut], texts[cut], scores.values[cut]) for row, cut in parts], scores
