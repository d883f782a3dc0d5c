"""The sections of a run's settings: each a frozen dataclass that checks its own values."""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le

from engines.validation import FINITE, LARGEST, PassThrough, check_types, option

if TYPE_CHECKING:  # processes of environments read a limit here, and load nothing of engines
    from engines.config import ServedModelConfig, VllmConfig

LARGEST_REWARD = 1e6
"""Largest absolute reward, beyond which an episode counts as failed: GRPO squares rewards in float32."""


@dataclass(frozen=True)
class DataConfig:
    """Rows to learn from."""

    train: str = ""
    """Rows to train on: a JSONL or parquet file, a folder or a pattern of parquet files ('FOLDER/train-*.parquet'), or
    a folder of Dataset.save_to_disk (FOLDER:SPLIT). Of the hub: hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CONFIG:SPLIT."""
    heldout: str = ""
    """Held-out rows, in a source of the same kinds: evaluated and never trained on. Empty evaluates nothing."""
    heldout_sets: dict[str, str] = field(default_factory=dict)
    """Further sets of held-out rows by name, such as aime aime.jsonl math hf:OWNER/NAME:test. Each has metrics of its
    own."""
    format: Literal["auto", "verl", "trl"] = "auto"
    """Format of the rows. Verl's have reward_model.ground_truth, TRL's a completion or, to be rewarded by a function
    alone, a prompt. Auto tells by the first row: without the answer field it is verl's or TRL's where it has theirs."""
    prompt_field: str = "prompt"
    """Field of a row that holds the prompt: text, or chat messages [{"role": text, "content": text}, ...]. A text gets
    the special tokens that the tokenizer puts before one (Llama's BOS), and no token after it."""
    answer_field: str = "answer"
    """Field of a row that holds the answer: text, for the reward function, or to learn in supervised training."""
    image_field: str = "images"
    """Field of a row that holds its images, for a vision-language model: a list of paths, relative to the rows' folder,
    or of {"bytes": ...}. The prompt has one <image> for each."""
    video_field: str = "videos"
    """Field of a row that holds its videos: a list of {"path": ..., "fps": ..., "rate" or "frames": ...}, or of paths.
    The prompt has one <video> for each. docs/vlm.md explains the keys."""
    instruction: str = ""
    """Text to append to a prompt, which then becomes the message of a user in the chat template. Empty leaves prompts
    as they are. Rows of messages are refused with it."""
    system: str = ""
    """Text of a system message, which begins every chat that has none. A prompt of text becomes the message of a user
    behind it. Empty adds none."""
    chat_template_args: PassThrough = field(default_factory=dict)
    """Variables of the model's chat template and their values, such as enable_thinking False."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 1024
    """Longest prompt in tokens. A longer one is an error that names its row, or is skipped with skip_long_prompts."""
    skip_long_prompts: bool = False
    """Skip rows whose prompt, or in supervised training whose answer, is too long."""
    skip_bad_images: bool = False
    """Skip rows of which an image or video is missing, damaged or too large, and say how many they are."""

    def __post_init__(self):
        check_types("data", self)
        for name in ("prompt_field", "answer_field"):
            if not getattr(self, name):
                raise ValueError(f"data: {name} must not be empty; set it to the name of a field of your rows")
        if clashes := sorted({"messages", "tools", "documents", "add_generation_prompt"} & {*self.chat_template_args}):
            raise ValueError(
                f"data: chat_template_args may not set {clashes}, which each prompt sets itself; leave them out"
            )
        if wrong := [name for name in self.heldout_sets if not re.fullmatch(r"[A-Za-z0-9.-]+", name)]:
            raise ValueError(
                f"data: heldout_sets has the name {wrong[0]!r}, which becomes part of metrics' names; use only "
                "letters, digits, dots and hyphens in it"
            )

    @property
    def heldouts(self) -> dict[str, str]:
        """Name of each held-out set -> its source; the name of ``heldout`` is empty."""
        return ({"": self.heldout} if self.heldout else {}) | self.heldout_sets


@dataclass(frozen=True)
class CurriculumConfig:
    """The choice of prompts: sources by weight, buckets of difficulty, and prompts left out by their pass rate."""

    sources: dict[str, float] = field(default_factory=dict)
    """Further sources of rows and their weights, such as b.jsonl 0.5; each gives that share of the prompts, however
    many rows it has. The weight of data.train is 1 unless it is named here too."""
    difficulty_field: str = ""
    """Field of a row that holds its difficulty, a number. Empty takes 1 less the running pass rate of a prompt."""
    buckets: dict[float, float] = field(default_factory=dict)
    """Buckets of difficulty, the easiest first: the largest difficulty in each, and its weight. For instance 0.3 1
    0.7 2 1 1 draws half of a source's prompts from the middle one."""
    advance_at: Annotated[float, Ge(0), Le(1)] = 0.0
    """Pass rate of the last 64 prompts from the hardest open bucket at which the next opens; at first the easiest alone
    is open. 0 opens all."""
    pass_rates: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest running pass rate of a prompt that is drawn. Others are left out three times, and drawn once
    more."""

    def __post_init__(self):
        check_types("curriculum", self)
        if wrong := {path: weight for path, weight in self.sources.items() if not (path and 0 < weight <= LARGEST)}:
            raise ValueError(
                f"curriculum: sources has {wrong}, expected the paths of rows and weights above 0; change "
                "--curriculum.sources"
            )
        weights = [*self.buckets.values()]
        if any(not 0 <= weight <= LARGEST for weight in weights) or (weights and not any(weights)):
            raise ValueError(
                f"curriculum: buckets has the weights {weights}, expected finite numbers of 0 or more and one above 0; "
                "change --curriculum.buckets"
            )
        low, high = self.pass_rates if len(self.pass_rates) == 2 else (1.0, 0.0)
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"curriculum: pass_rates={self.pass_rates} must be a lowest and a highest rate from 0 to 1; set "
                "--curriculum.pass-rates, such as 0.05 0.95"
            )
        bounds = [*self.buckets]
        if bounds != sorted(bounds) or (bounds and not self.difficulty_field and bounds[-1] < 1):
            raise ValueError(
                f"curriculum: buckets={self.buckets} must have rising bounds, of which the last holds the hardest "
                "prompts: 1 without a difficulty_field; change --curriculum.buckets"
            )
        self._check_schedule()

    def weigh_sources(self, train: str) -> dict[str, float]:
        """Return source of rows -> weight.

        Args:
            train: ``DataConfig.train``.
        """
        return ({train: 1.0} if train or not self.sources else {}) | self.sources

    def _check_schedule(self) -> None:
        if self.difficulty_field and not self.buckets:
            raise ValueError(
                f"curriculum: difficulty_field={self.difficulty_field!r} does nothing without buckets; leave it out or "
                "set --curriculum.buckets to the largest difficulty and the weight of each bucket: 1 3 2 1 makes a "
                "bucket of difficulties up to 1 with weight 3, and one of those above 1 up to 2 with weight 1"
            )
        if self.advance_at and not self.difficulty_field:
            raise ValueError(
                f"curriculum: advance_at={self.advance_at} opens buckets one after another, which needs rows with a "
                "difficulty; set --curriculum.difficulty-field and --curriculum.buckets, or leave "
                "--curriculum.advance-at out"
            )
        if self.advance_at and not next(iter(self.buckets.values())):
            raise ValueError(
                "curriculum: the first bucket has weight 0, so that with advance_at no prompt could be drawn at first; "
                "give it a weight above 0 in --curriculum.buckets"
            )


@dataclass(frozen=True)
class CriticConfig:
    """The critic of PPO: its values make the advantages. It has the actor's parallel sizes."""

    train: bool = False
    """Train a critic; advantages then come from generalised advantage estimation (GAE). Without it algorithm ppo does
    so too."""
    model: str = ""
    """HuggingFace folder or hf:ORG/NAME of a language model or a critic to start from; empty takes the actor's. A new
    value head starts at 0. With actor.lora.rank the actor's is held once for both."""
    lr: Annotated[float, Ge(0), FINITE] = 1e-5
    """Peak learning rate; the other optimizer settings are the actor's."""
    clip: Annotated[float, Ge(0), FINITE] = 0.0
    """Value clipping of PPO: the loss is max((V - R)^2, (V_clipped - R)^2) / 2, where V_clipped keeps V within clip of
    the value before the update. 0 turns it off."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Number of first steps in which the critic learns and the actor does not."""
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount factor of GAE, per token."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """Lambda of GAE: 1 takes the whole return less the value (no bias, most variance), 0 the one-step TD error."""

    def __post_init__(self):
        check_types("critic", self)


@dataclass(frozen=True)
class EnvironmentConfig:
    """Settings of environments and reward functions: the limits of an episode, and the processes that run them."""

    turns: Annotated[int, Ge(1)] = 16
    """Largest number of turns of an episode."""
    tokens: Annotated[int, Ge(0)] = 0
    """Longest sequence of an episode in tokens, prompt and observations included; 0 takes data.max_prompt_tokens +
    rollout.max_new_tokens."""
    time_limit_s: Annotated[float, Gt(0), FINITE] = 30.0
    """Seconds of an episode in which it awaits neither a sample nor a tool; of a reward function those of one call."""
    tool_limit_s: Annotated[float, Gt(0), FINITE] = 10.0
    """Seconds of a tool call without a limit of its own."""
    default_reward: Annotated[float, Ge(-LARGEST_REWARD), Le(LARGEST_REWARD)] = 0.0
    """Reward of an episode that failed: no end in time, an error, no number up to a million in size, a process that
    died."""
    pass_reward: Annotated[float, Ge(-LARGEST_REWARD), Le(LARGEST_REWARD)] = 1.0
    """Smallest reward of an episode that passes, or whose answer is right: for pass@k, maj@k and pass rates."""
    workers: Annotated[int, Ge(1)] = 1
    """Processes that run environments, spread over the nodes that Ray has, the driver's first."""

    def __post_init__(self):
        check_types("environment", self)


@dataclass(frozen=True)
class CheckpointConfig:
    """The schedule of checkpoints, and the number of them to keep."""

    save_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints; 0 saves by time and at the end."""
    save_minutes: Annotated[float, Ge(0), FINITE] = 30.0
    """Largest number of minutes between checkpoints; 0 saves by steps and at the end."""
    keep_newest: Annotated[int, Ge(0)] = 3
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_best: bool = True
    """Save at every new best of validation.metric on the held-out rows, and keep the best checkpoint."""

    def __post_init__(self):
        check_types("checkpoint", self)


@dataclass(frozen=True)
class PlacementConfig:
    """The processes and devices that hold each model."""

    dedicated_devices: tuple[Literal["critic", "reference"], ...] = ()
    """Models with processes and devices of their own; by default they share the actor's."""
    cpu_offload: tuple[Literal["reference"], ...] = ()
    """Models whose weights are offloaded to the host's memory while they do not compute."""
    colocate: bool = False
    """Rollout engines and the actor's ranks take turns on the same devices. Engines sleep while trainers compute, and
    trainers are offloaded to the host while engines sample. Models in dedicated_devices keep their own devices."""

    def __post_init__(self):
        check_types("placement", self)

    def check_shared(self, rollout: "VllmConfig", models: "Mapping[str, ServedModelConfig]", ranks: int) -> None:
        """Raise ValueError where engines cannot take turns with the actor's ranks on their devices."""
        if rollout.staleness:
            raise ValueError(
                f"config: rollout.staleness={rollout.staleness} samples while trainers compute, and placement.colocate "
                "has them take turns on the same devices; leave one of --rollout.staleness and --placement.colocate out"
            )
        for section, each in ({"rollout": rollout} | {f"models.{name}": each for name, each in models.items()}).items():
            if each.devices > ranks:
                raise ValueError(
                    f"config: placement.colocate puts {section}.engines={each.engines} x tp={each.tp} = {each.devices} "
                    f"devices onto those of actor.ranks={ranks}; lower --{section}.engines or --{section}.tp, or leave "
                    "--placement.colocate out"
                )

    def check_roles(self, roles: Container[str]) -> None:
        """Raise ValueError where a model that the run does not have is given a place."""
        if unused := [role for role in self.dedicated_devices if role not in roles]:
            raise ValueError(
                f"config: placement.dedicated_devices names {unused}, which this run does not have; leave "
                "--placement.dedicated-devices out, or set --critic.train or --algorithm.kl-coef"
            )
        if idle := [role for role in self.cpu_offload if role not in roles]:
            raise ValueError(
                f"config: placement.cpu_offload names {idle}, which this run does not have; leave "
                "--placement.cpu-offload out, or set --algorithm.kl-coef"
            )

    def check_view(self) -> None:
        """Raise ValueError where a reference that is the actor with its adapters off has a place of its own."""
        for name in ("dedicated_devices", "cpu_offload"):
            if "reference" in getattr(self, name):
                raise ValueError(
                    f"placement: {name}={getattr(self, name)} names the reference, which beside actor.lora.rank is the "
                    f"actor with its adapters off and takes no memory; leave it out of {option('placement', name)}"
                )


@dataclass(frozen=True)
class LimitsConfig:
    """Limits on the difference between rollout and trainer logprobs, and between a rollout's policy and the trained."""

    logprob_diff_mean: Annotated[float, Ge(0)] | None = None
    """Limit on a step's mean |rollout - trainer logprob|. None takes a multiple of the rounding that is measured before
    the first step. In float32 it is twice as much, at least 2e-5. In bfloat16 it is five times as much, at most 0.5."""
    logprob_diff_max: Annotated[float, Ge(0)] | None = None
    """Limit on the difference of a single token; None takes 5e-3 in float32 and no limit in bfloat16."""
    ignore_logprob_diff: bool = False
    """Warn at each step that exceeds a limit, and go on."""
    epoch_kl: Annotated[float, Gt(0), FINITE] | None = None
    """Mean KL of the rollout's policy to the trained one in an epoch, beyond which the step takes no further epoch over
    its rollout. None takes them all."""

    def __post_init__(self):
        check_types("limits", self)


@dataclass(frozen=True)
class RecoveryConfig:
    """Detection and replacement of lost processes."""

    stall_timeout_s: Annotated[float, Ge(1), FINITE] = 300.0
    """Seconds without a sign of life after which a process counts as hanging and is killed. A busy process gives signs
    of life."""
    restarts: Annotated[int, Ge(0)] = 0
    """Number of times that the run replaces lost processes and goes on. A new rollout engine gets the current weights;
    trainers go back to the newest checkpoint. 0 ends the run at the first loss."""

    def __post_init__(self):
        check_types("recovery", self)
