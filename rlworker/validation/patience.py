"""The early stop of a run whose validations find no new best."""

import math
from collections.abc import Mapping, Sequence

from rlworker.config.validation import ValidationConfig
from rlworker.tracking.run_folder import Score


def has_stalled(lines: Sequence[Mapping[str, float]], score: Score, settings: ValidationConfig) -> bool:
    """Tell whether the last ``settings.patience`` validations have found no new best; a patience of 0 is never used up.

    Args:
        lines: metrics of each step so far. score: the metric that is compared.
    """
    scores = [score.find(line) for line in lines if score.name in line]
    values = [-math.inf if found is None else score.sign * found for found in scores]
    best = max(range(len(values)), key=values.__getitem__, default=0)  # of equals the first
    return 0 < settings.patience < len(values) - best


def describe_stall(score: Score, settings: ValidationConfig) -> str:
    """Say why a run has ended early, and how to continue it."""
    return (
        f"{score.name} has had no new best for {settings.patience} validations; --resume with a larger "
        "--validation.patience goes on"
    )
