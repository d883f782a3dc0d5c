"""Settings of validation on held-out rows, and the names of its metrics."""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from engines.validation import check_types


def name_set(name: str) -> str:
    """Return the metric of a held-out set: ``heldout``, or ``heldout/NAME`` if the set has a name."""
    return f"heldout/{name}" if name else "heldout"


def list_sizes(samples: int) -> list[int]:
    """List each k of pass@k and maj@k for a number of samples: 1, 2, 4 and so on, and the number itself."""
    return [*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples] if samples else []


@dataclass(frozen=True)
class ValidationConfig:
    """Validation on the held-out rows: samples beside the greedy answers, the best checkpoint, and the early stop."""

    samples: Annotated[int, Ge(0), Le(1024)] = 0
    """Number of samples of each held-out prompt, beside its greedy answer. Of them are mean@n, pass@k and maj@k. 0
    takes none."""
    temperature: Annotated[float, Ge(0.01), Le(2)] | None = None
    """Temperature of these samples; None takes that of the rollouts. Their top-k, top-p and min-p are the rollouts'."""
    metric: str = ""
    """Metric of the held-out rows by which a checkpoint is the best and patience counts. Empty takes heldout, in
    supervised training heldout_loss; without data.heldout it is that of the first of data.heldout_sets."""
    patience: Annotated[int, Ge(0)] = 0
    """Number of validations in a row without a new best of the metric, after which the run ends; 0 never ends it."""

    def __post_init__(self):
        check_types("validation", self)

    def list_metrics(self, sets: Iterable[str], ending: str = "") -> list[str]:
        """List the metrics of held-out sets by which checkpoints can be compared.

        Args:
            sets: names of the sets.
            ending: ending of the name of a set's first metric, such as ``_loss``.
        """
        sizes = list_sizes(self.samples)
        further = [f"_mean_at_{self.samples}"] if sizes else []
        further += [f"_{kind}_at_{size}" for kind in ("pass", "maj") for size in sizes]
        return [f"{name_set(name)}{each}" for name in sets for each in (ending, *further)]

    def choose_metric(self, sets: Collection[str], eval_every: int, ending: str = "") -> str:
        """Choose the metric by which checkpoints are compared.

        Args:
            sets, ending: as for ``list_metrics``. eval_every: steps between validations.

        Raises:
            ValueError: there is no such metric, or there are too few validations for ``patience``.
        """
        metrics = self.list_metrics(sets, ending)
        if self.metric and self.metric not in metrics:
            close = difflib.get_close_matches(self.metric, metrics, 1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else "set --data.heldout or --data.heldout-sets"
            listed = f"one of {', '.join(metrics)}" if metrics else "none, since there are no held-out rows"
            raise ValueError(f"validation: metric={self.metric!r} must be {listed}; {hint}")
        if self.patience and not (metrics and eval_every):
            lacks, option = (
                ("eval_every=0 validates before the first and after the last step", "--eval-every")
                if metrics
                else ("there are no held-out rows", "--data.heldout")
            )
            raise ValueError(
                f"validation: patience={self.patience} counts validations, and {lacks}; set {option}, or leave "
                "--validation.patience out"
            )
        return self.metric or (metrics[0] if metrics else f"heldout{ending}")
