"""Settings of supervised training, checked before Ray or Megatron starts."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from engines.config import MegatronConfig
from engines.models.hub import FindModel, find_model
from engines.models.spec import ModelSpec
from rlworker.config.model_checks import check_trainable
from rlworker.config.run import TrainingConfig, set_decay


@dataclass(frozen=True)
class SftConfig(TrainingConfig):
    """Supervised training on rows of a prompt and an answer, or of conversations.

    The model learns the answer and the token that ends it: the chat template's, or behind plain text the
    end-of-sequence token. Of a conversation (fields ``messages`` and ``tools``) it learns the assistant's messages.
    """

    rows_per_step: Annotated[int, Ge(1)] = 64
    """Number of rows in an optimizer step."""
    max_answer_tokens: Annotated[int, Ge(1)] = 1024
    """Longest answer in tokens, its end included. A longer one is an error that names its row, or is skipped with
    data.skip_long_prompts. A conversation may have data.max_prompt_tokens + max_answer_tokens."""

    _heldout_ending = "_loss"

    def __post_init__(self):
        super().__post_init__()
        if self.validation.samples:
            raise ValueError(
                f"config: validation.samples={self.validation.samples} samples answers to held-out prompts, and "
                "supervised training has no rewards to score them by; leave --validation.samples out, or run an RL "
                "recipe with --evaluate"
            )
        self.actor.check_longest(self.longest)
        if self.rows_per_step < self.actor.dp:
            raise ValueError(
                f"config: rows_per_step={self.rows_per_step} leaves some of {self.actor.dp} data-parallel ranks "
                "without a row; raise --rows-per-step"
            )

    @property
    def rows_per_mini_batch(self) -> int:
        """Number of rows of an optimizer step, which is the whole step."""
        return self.rows_per_step

    @property
    def longest(self) -> int:
        """Most tokens of a row."""
        return self.data.max_prompt_tokens + self.max_answer_tokens

    @property
    def actor_of_run(self) -> MegatronConfig:
        """The actor's settings; unless they set the length of the decay, it ends with the run."""
        return set_decay(self.actor, self.steps)

    @property
    def models(self) -> dict[str, str]:
        """Role -> folder of the model, for the only model."""
        return {"actor": self.model}

    @property
    def num_workers(self) -> int:
        """Number of devices that the run's workers hold at once."""
        return self.actor.ranks

    @property
    def worker_groups(self) -> list[tuple[str, int, int, int]]:
        """The only group of workers: name, ranks, devices of a rank, and consecutive ranks that must share a node."""
        return [("actor", self.actor.ranks, 1, self.actor.tp)]

    def check_models(self, find: FindModel = find_model, is_whole: bool = True) -> dict[str, ModelSpec]:
        """Return role -> model for the only model, checked against the engine that will hold it.

        Args:
            find: returns the folder of a model, given its name.
            is_whole: whether the folder has more than config.json, which is checked as well.

        Raises:
            ValueError: the engine cannot hold the model, or the model has fewer positions than the longest row.
        """
        model = ModelSpec.from_folder(find(self.model))
        self.actor.check_spread(model)
        check_trainable(model, self.actor, self.platform, is_whole)
        if self.longest > model.max_positions:
            raise ValueError(
                f"config: max_prompt_tokens + max_answer_tokens = {self.longest} is above the model's "
                f"{model.max_positions} positions; lower one of them"
            )
        return {"actor": model}
