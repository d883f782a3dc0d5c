"""The sections of a run's settings: each a frozen dataclass that checks its own values."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from engines.validation import FINITE, LARGEST, check_numbers, check_types

LARGEST_REWARD = 1e6
"""Size beyond which a reward counts as failed: GRPO squares rewards in float32."""


@dataclass(frozen=True)
class DataConfig:
    """Rows to learn from."""

    train: str = ""
    """A JSONL or .parquet file, a folder of parquet files or a pattern of them ('FOLDER/train-*.parquet'), a folder of
    Dataset.save_to_disk (FOLDER:SPLIT for a DatasetDict's), or a data set of the HuggingFace hub (hf:OWNER/NAME:SPLIT,
    hf:OWNER/NAME/CONFIG:SPLIT)."""
    heldout: str = ""
    """Rows of the same form, never trained on; empty evaluates nothing."""
    prompt_field: str = "prompt"
    """Field of a row that holds the prompt: text, or chat messages [{"role": text, "content": text}, ...]. Text comes
    after the special tokens that the tokenizer opens one with (Llama's BOS); what it ends one with is left out."""
    answer_field: str = "answer"
    """Field of a row that holds the answer: text, given to the reward function or learned."""
    image_field: str = "images"
    """Field of a row that holds its images, for a vision-language model: a list of paths (from the rows' folder) or
    of {"bytes": ...}; the prompt has <image> where each belongs."""
    video_field: str = "videos"
    """Field of a row that holds its videos: a list of {"path": ..., "fps": ..., "rate" or "frames": ...}, or of paths;
    the prompt has <video> where each belongs. docs/vlm.md says what the keys mean."""
    instruction: str = ""
    """A text prompt becomes a user's message that ends with this, by the chat template; empty leaves it as it is. Rows
    of messages have their own."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 1024
    """A longer prompt is an error that names its row, or is skipped with skip_long_prompts."""
    skip_long_prompts: bool = False
    """Leave rows out whose prompt is longer than max_prompt_tokens, or in supervised training the answer too long."""

    def __post_init__(self):
        check_types("data", self)
        for name in ("prompt_field", "answer_field"):
            if not getattr(self, name):
                raise ValueError(f"data: {name} must not be empty; set it to the name of a field of your rows")


@dataclass(frozen=True)
class AlgorithmConfig:
    """Settings of what is maximised."""

    clip_low: Annotated[float, Ge(0)] = 0.2
    """The policy ratio is clipped at 1 - clip_low."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """The policy ratio is clipped at 1 + clip_high."""
    dual_clip: float = 0.0
    """Where the advantage is negative the loss is at most this times its size; 0 leaves that out, else above 1."""
    kl_coef: Annotated[float, Ge(0), FINITE] = 0.0
    """Weight of the KL penalty to the reference; above 0 a reference model runs too."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL penalty: in the loss, or in each token's reward."""
    reference: str = ""
    """HuggingFace folder or hf:ORG/NAME of the reference, which then runs whatever kl_coef is (a teacher, say); without
    one it is the starting model."""
    importance: Literal["auto", "truncated", "none"] = "auto"
    """Factor of each token's loss: none, or truncated, trainer's over rollout's probability held to 2 at most; auto
    truncates where an engine is bfloat16 or rollouts run ahead. A loss of the recipe's own takes it as correction."""
    score_centering: Annotated[int, Ge(0)] = 0
    """Take the rollout's mean drift out of the gradient, of so many of its likeliest tokens in each place (score
    centering, arXiv:2609.20807); 0 leaves it in. A loss of the recipe's own calls center_scores."""
    entropy_coef: Annotated[float, Ge(0), FINITE] = 0.0
    """Weight of the entropy in what is maximised."""
    mini_batches: Annotated[int, Ge(1)] = 1
    """Optimizer steps per rollout."""
    greedy_baseline: bool = False
    """Reward a greedy completion of every prompt as well, for ReMax."""
    dynamic_sampling: Annotated[int, Ge(0)] = 0
    """Most further rollouts of a step, whose prompts take the place of zero-variance groups (DAPO)."""

    def __post_init__(self):
        check_types("algorithm", self)
        rule = "0, or above 1 and finite"
        check_numbers("algorithm", self, rule, lambda x: x == 0 or 1 < x <= LARGEST, "dual_clip")
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError("algorithm: kl_in='reward' needs a weight of the KL penalty; set --algorithm.kl-coef")


@dataclass(frozen=True)
class CriticConfig:
    """A critic that learns beside the actor, on the actor's parallel sizes; its values make the advantages (PPO)."""

    train: bool = False
    """Train a critic; advantages then come from generalised advantage estimation."""
    model: str = ""
    """HuggingFace folder or hf:ORG/NAME to start from, of a language model or a critic; without one the actor's. A new
    head is 0."""
    lr: Annotated[float, Ge(0), FINITE] = 1e-5
    """Peak learning rate; its lr scheduler has the shape of the actor's."""
    clip: Annotated[float, Ge(0), FINITE] = 0.0
    """A value counts as having moved no further than this since the rollout, where that makes its loss larger; 0 does
    not clip."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """First steps in which the critic alone learns."""
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """Lambda of generalised advantage estimation: 1 takes whole returns, 0 one token's."""

    def __post_init__(self):
        check_types("critic", self)


@dataclass(frozen=True)
class EnvironmentConfig:
    """Settings of environments and reward functions: the limits of an episode, and the processes that run them."""

    turns: Annotated[int, Ge(1)] = 16
    """Most samples of an episode."""
    tokens: Annotated[int, Ge(0)] = 0
    """Most tokens of a sequence of an episode, prompt and observations among them; 0 takes data.max_prompt_tokens +
    rollout.max_new_tokens."""
    time_limit_s: Annotated[float, Gt(0), FINITE] = 30.0
    """Seconds of an episode in which it awaits neither a sample nor a tool; of a reward function those of one call."""
    tool_limit_s: Annotated[float, Gt(0), FINITE] = 10.0
    """Seconds of a tool call without a limit of its own."""
    default_reward: Annotated[float, Ge(-LARGEST_REWARD), Le(LARGEST_REWARD)] = 0.0
    """Reward of an episode that failed: no end in time, an error, no number up to a million in size, a process that
    died."""
    workers: Annotated[int, Ge(1)] = 1
    """Processes that run environments, spread over the nodes that Ray has, the driver's first."""

    def __post_init__(self):
        check_types("environment", self)


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of when a run saves, and which of its checkpoints stay."""

    save_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints; 0 saves by time alone, and at the end."""
    save_minutes: Annotated[float, Ge(0), FINITE] = 30.0
    """Most minutes between checkpoints; 0 saves by steps alone, and at the end."""
    keep_newest: Annotated[int, Ge(0)] = 3
    """Newest checkpoints that are kept; 0 keeps all."""
    keep_best: bool = True
    """Save whenever the held-out rows have not been answered better, and keep that checkpoint too."""

    def __post_init__(self):
        check_types("checkpoint", self)


@dataclass(frozen=True)
class PlacementConfig:
    """Settings of which processes hold which model."""

    separate: tuple[Literal["critic", "reference"], ...] = ()
    """Models that get processes of their own; the others share the actor's."""
    on_host: tuple[Literal["reference"], ...] = ()
    """Models whose weights wait in the host's memory while they do not compute."""
    colocate: bool = False
    """Rollout engines take turns with the actor's ranks on the same devices, engines asleep and trainers in the host's
    memory while it is the others' turn; models in separate keep devices of their own."""

    def __post_init__(self):
        check_types("placement", self)


@dataclass(frozen=True)
class LimitsConfig:
    """Limits that end a run when they are exceeded."""

    logprob_diff_mean: Annotated[float, Ge(0)] | None = None
    """Largest mean |rollout - trainer logprob| of a step; None takes 2e-5 (float32), or in bfloat16 five times what is
    measured before the first step, at most 0.5."""
    logprob_diff_max: Annotated[float, Ge(0)] | None = None
    """Largest single difference; None takes 5e-3 (float32) or no limit (bfloat16)."""
    ignore_logprob_diff: bool = False
    """Go on, with a warning at each step, where rollout and trainer disagree."""

    def __post_init__(self):
        check_types("limits", self)


@dataclass(frozen=True)
class RecoveryConfig:
    """Settings of what becomes of a run that loses processes."""

    stall_timeout_s: Annotated[float, Ge(1), FINITE] = 300.0
    """Seconds without a sign of life after which a process counts as standing still and is ended; one that is merely
    busy gives signs of life."""
    restarts: Annotated[int, Ge(0)] = 0
    """Most times that lost processes are replaced and the run goes on in the same program: rollout engines with the
    weights of the others, trainers from the newest checkpoint. 0 ends the run at the first."""

    def __post_init__(self):
        check_types("recovery", self)
