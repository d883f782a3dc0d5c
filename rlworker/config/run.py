"""Settings of a run. Every value is checked before Ray, Megatron or vLLM starts."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Self

from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from engines.validation import LARGEST, check_numbers, check_types
from hardware.attention.rules import slot_unit
from hardware.platforms import DEFAULT_PLATFORM, PlatformName
from rlworker.config.model_checks import check_engines, check_sees_alike, check_trained

_LOGPROB_LIMITS = {"float32": (2e-5, 5e-3), "bfloat16": (5e-2, float("inf"))}
"""dtype -> mean and max of |rollout - trainer logprob| beyond which something is wrong rather than rounded."""


@dataclass(frozen=True)
class DataConfig:
    """Rows to learn from."""

    train: str = ""
    """A JSONL or .parquet file, a folder of Dataset.save_to_disk (FOLDER:SPLIT for a DatasetDict's), or a data set of
    the HuggingFace hub (hf:OWNER/NAME:SPLIT, hf:OWNER/NAME/CONFIG:SPLIT)."""
    heldout: str = ""
    """Rows of the same form, never trained on; empty evaluates nothing."""
    prompt_field: str = "prompt"
    """Field of a row that holds the prompt: text, or chat messages [{"role": text, "content": text}, ...]. Text comes
    after the special tokens that the tokenizer opens one with (Llama's BOS); what it ends one with is left out."""
    answer_field: str = "answer"
    """Field of a row that holds the answer: text, given to the reward function or learned."""
    image_field: str = "images"
    """Field of a row that holds its pictures, for a vision-language model: a list of paths (from the rows' folder) or
    of {"bytes": ...}; the prompt has <image> where each belongs."""
    instruction: str = ""
    """A text prompt becomes a user's message that ends with this, by the chat template; empty leaves it as it is. Rows
    of messages have their own."""
    max_prompt_tokens: int = 1024
    """A longer prompt is an error that names its row, or is skipped with skip_long_prompts."""
    skip_long_prompts: bool = False
    """Leave rows out whose prompt is longer than max_prompt_tokens, or in supervised training the answer too long."""

    def __post_init__(self):
        check_types("data", self)
        check_numbers("data", self, "at least 1", lambda x: x >= 1, "max_prompt_tokens")
        for name in ("prompt_field", "answer_field"):
            if not getattr(self, name):
                raise ValueError(f"data: {name} must not be empty; set it to the name of a field of your rows")


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is maximised."""

    clip_low: float = 0.2
    """The policy ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """The policy ratio is clipped at 1 + clip_high."""
    dual_clip: float = 0.0
    """Where the advantage is negative the loss is at most this times its size; 0 leaves that out, else above 1."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference; above 0 a reference model runs too."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes: into the loss, or into each token's reward."""
    reference: str = ""
    """HuggingFace folder of the reference, which then runs whatever kl_coef is (a teacher, say); without one it is the
    starting model."""
    entropy_coef: float = 0.0
    """Weight of the entropy in what is maximised."""
    mini_batches: int = 1
    """Optimizer steps per rollout."""
    greedy_baseline: bool = False
    """Reward a greedy completion of every prompt as well, for ReMax."""
    dynamic_sampling: int = 0
    """Most further rollouts of a step, whose prompts take the place of those with rewards all alike (DAPO)."""

    def __post_init__(self):
        check_types("algorithm", self)
        check = partial(check_numbers, "algorithm", self)
        check("at least 1", lambda x: x >= 1, "mini_batches")
        check("0 or more", lambda x: x >= 0, "clip_low", "clip_high", "dynamic_sampling")
        check("0, or above 1 and finite", lambda x: x == 0 or 1 < x <= LARGEST, "dual_clip")
        check("finite and not negative", lambda x: 0 <= x <= LARGEST, "kl_coef", "entropy_coef")
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError("algorithm: kl_in='reward' needs a weight of the KL penalty; set --algorithm.kl-coef")


@dataclass(frozen=True)
class CriticConfig:
    """A critic that learns beside the actor, on the actor's parallel sizes; its values make the advantages (PPO)."""

    train: bool = False
    """Train a critic; advantages then come from generalised advantage estimation."""
    model: str = ""
    """HuggingFace folder to start from, of a language model or a critic; without one the actor's. A new head is 0."""
    lr: float = 1e-5
    """Peak learning rate; its schedule has the shape of the actor's."""
    clip: float = 0.0
    """A value counts as having moved no further than this since the rollout, where that makes its loss larger; 0 does
    not clip."""
    warmup_steps: int = 0
    """First steps in which the critic alone learns."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Of generalised advantage estimation: 1 takes whole returns, 0 one token's."""

    def __post_init__(self):
        check_types("critic", self)
        check = partial(check_numbers, "critic", self)
        check("finite and not negative", lambda x: 0 <= x <= LARGEST, "lr", "clip")
        check("0 or more", lambda x: x >= 0, "warmup_steps")
        check("from 0 to 1", lambda x: 0 <= x <= 1, "gamma", "lam")


@dataclass(frozen=True)
class RewardConfig:
    """Where the reward function runs, and what becomes of a text that it fails on."""

    workers: int = 1
    """Processes that call it, all on the controller's machine."""
    time_limit_s: float = 10.0
    """Seconds that one call may take; one that takes longer is ended and counts as failed."""
    default: float = 0.0
    """Reward of a text whose call failed: no end in time, an error, no finite number, a process that died."""

    def __post_init__(self):
        check_types("reward", self)
        check = partial(check_numbers, "reward", self)
        check("at least 1", lambda x: x >= 1, "workers")
        check("above 0 and finite", lambda x: 0 < x <= LARGEST, "time_limit_s")
        check("a finite number", math.isfinite, "default")


def check_slots(actor: MegatronConfig, longest: int) -> None:
    """Raise ValueError where a fixed number of slots does not hold the longest sequence; its last token is no input."""
    unit = slot_unit(actor.tp, actor.cp, actor.multiple)
    need = -(-(longest - 1) // unit) * unit
    if 0 < actor.slots < need:
        raise ValueError(
            f"actor: slots={actor.slots} does not hold the longest sequence, {longest} tokens, which takes {need}; "
            "raise --actor.slots or leave it out"
        )


def decaying_over(engine: MegatronConfig, optimizer_steps: int) -> MegatronConfig:
    """The settings with a decay over the whole run where no other length was asked for."""
    whole = max(optimizer_steps, engine.lr_warmup_steps + 1)
    return replace(engine, lr_decay_steps=engine.lr_decay_steps or whole)


@dataclass(frozen=True)
class TrainingConfig:
    """What every run that trains has."""

    model: str = ""
    """Folder of a saved HuggingFace model with its tokenizer."""
    run_dir: str = ""
    """Folder that receives everything the run writes."""
    data: DataConfig = field(default_factory=DataConfig)
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine the engines run on."""
    steps: int = 100
    """Steps of the run: of RL rollouts, each followed by its update; of supervised training optimizer steps."""
    eval_every: int = 0
    """Steps between evaluations on the held-out rows; 0 evaluates before and after only."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves by time alone, and at the end."""
    save_minutes: float = 30.0
    """Most minutes between checkpoints; 0 saves by steps alone, and at the end."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept; 0 keeps all."""
    keep_best: bool = True
    """Save whenever the held-out rows have not been answered better, and keep that checkpoint too."""
    seed: int = 0
    """Decides the order of prompts and every sample."""
    resume: bool = False
    """Go on from the newest checkpoint in run_dir; where there is no run yet, begin one."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go beside metrics.jsonl: run_dir/tensorboard, run_dir/wandb (offline unless WANDB_MODE is set)."""

    def __post_init__(self):
        check_types("config", self)
        check_numbers("config", self, "at least 1", lambda x: x >= 1, "steps")
        check_numbers("config", self, "0 or more", lambda x: x >= 0, "eval_every", "save_every", "keep_checkpoints")
        check_numbers("config", self, "finite and not negative", lambda x: 0 <= x <= LARGEST, "save_minutes")
        # Generators of 64 bits are seeded with a million times it and the step.
        check_numbers("config", self, "from 0 to 4294967295", lambda x: 0 <= x < 2**32, "seed")

    def on_platform(self, name: PlatformName) -> Self:
        """The same run on another kind of machine. A recipe that takes its sizes from the machine says how here."""
        return replace(self, platform=name)


@dataclass(frozen=True)
class RunConfig(TrainingConfig):
    """One RL run."""

    rollout: VllmConfig = field(default_factory=VllmConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    separate: tuple[Literal["critic", "reference"], ...] = ()
    """Models that get processes of their own; the others share the actor's."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    prompts_per_step: int = 32
    """Prompts sampled in a step."""
    samples_per_prompt: int = 8
    """Completions of each prompt."""
    logprob_diff_mean: float | None = None
    """Largest mean |rollout - trainer logprob| of a step; None takes 2e-5 (float32) or 0.05 (bfloat16)."""
    logprob_diff_max: float | None = None
    """Largest single difference; None takes 5e-3 (float32) or no limit (bfloat16)."""
    ignore_logprob_diff: bool = False
    """Go on, with a warning at each step, where rollout and trainer disagree."""

    def __post_init__(self):
        super().__post_init__()
        check = partial(check_numbers, "config", self)
        check("at least 1", lambda x: x >= 1, "prompts_per_step", "samples_per_prompt")
        check("0 or more", lambda x: x >= 0, "logprob_diff_mean", "logprob_diff_max")
        if unused := [role for role in self.separate if role not in self.models]:
            raise ValueError(
                f"config: separate names {unused}, which this run does not have; leave it out, or set --critic.train "
                "or --algorithm.kl-coef"
            )
        if self.critic.train and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"config: critic.warmup_steps={self.critic.warmup_steps} leaves the actor none of steps={self.steps}; "
                "lower --critic.warmup-steps"
            )
        if self.algorithm.dynamic_sampling and self.samples_per_prompt == 1:
            raise ValueError(
                "config: dynamic_sampling needs samples that can differ, got samples_per_prompt=1; raise it or leave "
                "--algorithm.dynamic-sampling out"
            )
        if self.samples_per_step < self.actor.dp * self.algorithm.mini_batches:
            raise ValueError(
                f"config: prompts_per_step x samples_per_prompt = {self.samples_per_step} samples cannot feed "
                f"mini_batches={self.algorithm.mini_batches} on {self.actor.dp} data-parallel ranks; raise one of them"
            )
        check_slots(self.actor, self.longest)
        if self.prompts_per_step < self.rollout.engines:
            raise ValueError(
                f"config: prompts_per_step={self.prompts_per_step} leaves some of {self.rollout.engines} rollout "
                "engines without work; lower --rollout.engines"
            )
        if self.longest > self.rollout.max_model_len:
            raise ValueError(
                f"config: max_prompt_tokens + max_new_tokens = {self.longest} exceeds "
                f"rollout.max_model_len={self.rollout.max_model_len}; raise it or lower one of them"
            )

    @property
    def image_memory_mb(self) -> int:
        """What the largest picture may take, decoded, in every process that decodes it."""
        return min(self.actor.image_memory_mb, self.rollout.image_memory_mb)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def rows_per_mini_batch(self) -> int:
        """Samples of the largest mini-batch."""
        return -(-self.samples_per_step // self.algorithm.mini_batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def actor_of_run(self) -> MegatronConfig:
        """The actor's settings with a decay over the whole run where no other length was asked for."""
        steps = self.steps - (self.critic.warmup_steps if self.critic.train else 0)
        return decaying_over(self.actor, steps * self.algorithm.mini_batches)

    @property
    def critic_of_run(self) -> MegatronConfig:
        """The actor's settings at the critic's rate."""
        lr, share = self.critic.lr, self.actor.min_lr / self.actor.lr if self.actor.lr else 0.0
        critic = replace(self.actor, lr=lr, min_lr=lr * share)
        return decaying_over(critic, self.steps * self.algorithm.mini_batches)

    @property
    def models(self) -> dict[str, str]:
        """The folder of each training engine's model, by role."""
        folders = {"actor": self.model}
        if self.algorithm.kl_coef or self.algorithm.reference:
            folders["reference"] = self.algorithm.reference or self.model
        if self.critic.train:
            folders["critic"] = self.critic.model or self.model
        return folders

    @property
    def actors(self) -> int:
        """Ray actors that the run needs at once."""
        return self.rollout.engines + self.actor.ranks * (1 + len(set(self.separate)))

    @property
    def logprob_limits(self) -> tuple[float, float]:
        """Mean and max of |rollout - trainer logprob| that stop the run."""
        mean, largest = _LOGPROB_LIMITS["float32" if self._is_fp32 else "bfloat16"]
        given = self.logprob_diff_mean, self.logprob_diff_max
        return (mean if given[0] is None else given[0], largest if given[1] is None else given[1])

    @property
    def _is_fp32(self) -> bool:
        return self.actor.dtype == self.rollout.dtype == "float32"

    def check_models(self) -> dict[str, ModelSpec]:
        """Every model of the run by role, checked against the engines that will hold it.

        Raises:
            ValueError: one cannot be held, or the reference does not know the actor's vocabulary.
        """
        specs = {"actor": check_engines(self.model, self.platform, self.actor, self.rollout)}
        for role, folder in self.models.items():
            if role == "actor":
                continue
            option = {"critic": "--critic.model", "reference": "--algorithm.reference"}[role]
            try:
                spec = ModelSpec.from_folder(folder, head="value" if role == "critic" else "language")
                check_trained(spec, self.actor, self.platform)
                check_sees_alike(spec, specs["actor"])
            except ValueError as error:
                raise ValueError(f"{role} ({option}): {error}") from None
            wanted = (("tokens in its vocabulary", spec.vocab, specs["actor"].vocab),)
            wanted += (("positions", spec.max_positions, self.longest),)
            for what, have, need in wanted:
                if have < need:
                    raise ValueError(
                        f"{role} ({option}): the model in {folder!r} has {have} {what}, expected at least {need}; take "
                        "one of the actor's tokenizer and length"
                    )
            specs[role] = spec
        return specs
