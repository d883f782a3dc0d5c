"""Settings of a run. Every value is checked before Ray, Megatron or vLLM starts."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le

from engines.config import MegatronConfig, ServedModelConfig, VllmConfig
from engines.config.rollout import find_weight_way
from engines.models.hub import FindModel, find_model
from engines.models.spec import ModelSpec
from engines.validation import check_types, option, parse_steps
from hardware.platforms import DEFAULT_PLATFORM, PlatformName, get_platform
from rlworker.config.algorithm import TEACHER, AlgorithmConfig, DistillConfig, Importance
from rlworker.config.model_checks import check_engines
from rlworker.config.sections import (
    CheckpointConfig,
    CriticConfig,
    CurriculumConfig,
    DataConfig,
    EnvironmentConfig,
    LimitsConfig,
    PlacementConfig,
    RecoveryConfig,
)
from rlworker.config.validation import ValidationConfig

_FP32_LIMITS = 2e-5, 5e-3
"""Mean and largest |rollout - trainer logprob| in float32; larger ones are not due to rounding."""
_FP32_FLOORS = 2.0
"""In float32 the limit on the mean is at least this multiple of the floor."""
_FLOORS, _MOST = 5.0, 0.5
"""In bfloat16 the limit on the mean is this multiple of the floor, at most the second number: models round by 0.02 to
0.1."""
TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]
"""Trackers that a run can open by name; rlworker/tracking/named_trackers.py opens them."""


def set_decay(engine: MegatronConfig, optimizer_steps: int) -> MegatronConfig:
    """Return the settings with a decay over ``optimizer_steps``, unless they set its length."""
    optimizer = engine.optimizer
    whole = max(optimizer_steps, optimizer.lr_warmup_steps + 1)
    return replace(engine, optimizer=replace(optimizer, lr_decay_steps=optimizer.lr_decay_steps or whole))


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of every run that trains."""

    model: str = ""
    """Folder of a saved HuggingFace model with its tokenizer, or a model of the hub: hf:ORG/NAME or
    hf:ORG/NAME@REVISION. A hub model is downloaded into the hub's cache; --resume keeps the run's first commit."""
    run_dir: str = ""
    """Run folder: checkpoints, metrics, samples and the report are written there."""
    data: DataConfig = field(default_factory=DataConfig)
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine that the engines run on."""
    steps: Annotated[int, Ge(1)] = 100
    """Number of steps: in RL a rollout and its update, in supervised training an optimizer step."""
    eval_every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations on the held-out rows; 0 evaluates before the first and after the last step."""
    # Generators of 64 bits are seeded with a million times it and the step.
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of the order of prompts and of every sample."""
    resume: bool = False
    """Go on from the newest checkpoint in run_dir, with another learning rate, batch or number of steps if set. A
    run_dir without a run begins one."""
    profile_steps: str = ""
    """Steps A:B to profile, from A to B; traces of every engine and phase go to run_dir/profile. Empty takes none."""
    capsule_steps: str = ""
    """Steps A:B to keep in run_dir/capsules, each with the checkpoint before it, for rlworker replay."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that get the metrics beside metrics.jsonl. They write into run_dir and stay offline, unless
    variables of the tracker, such as WANDB_MODE, say otherwise."""

    _heldout_ending = ""

    def __post_init__(self):
        check_types("config", self)
        _ = self.profiled_steps, self.capsuled_steps  # refused here where they are no steps

    @property
    def profiled_steps(self) -> range:
        """The steps to profile."""
        return parse_steps("profile_steps", self.profile_steps, self.steps)

    @property
    def capsuled_steps(self) -> range:
        """The steps to keep as capsules."""
        return parse_steps("capsule_steps", self.capsule_steps, self.steps)

    def choose_metric(self) -> str:
        """Choose the metric by which checkpoints are compared; ValueError if there is no metric of that name."""
        return self.validation.choose_metric(self.data.heldouts, self.eval_every, self._heldout_ending)

    def keeps_samples(self, step: int) -> bool:
        """Tell whether samples of a step are stored even if the step has no evaluation."""
        return step in (1, self.steps)

    @property
    def roles(self) -> dict[str, str]:
        """Role -> name or folder of the model, for each training engine."""
        return {"actor": self.model}

    @property
    def num_workers(self) -> int:
        """Number of devices that the run's workers hold at once."""
        raise NotImplementedError

    @property
    def worker_groups(self) -> list[tuple[str, int, int, int]]:
        """The groups of workers in the order of their placement: name, number of workers, devices of a worker, and
        number of consecutive workers that must share a node."""
        raise NotImplementedError

    @property
    def dtypes(self) -> dict[str, str]:
        """Section of the settings -> type of the weights and activations of its engines."""
        return {"actor": self.actor.dtype}

    def fit_to_model(self) -> Self:
        """Return the settings fitted to the model. A recipe with sizes that depend on the model overrides this."""
        return self

    def move_to_platform(self, name: PlatformName) -> Self:
        """Return the settings for another platform. Engines with the old platform's default dtype get the new one's.

        A recipe whose sizes depend on the machine overrides this.
        """
        usual, dtype = (get_platform(each).default_dtype for each in (self.platform, name))
        engines = {
            section: replace(getattr(self, section), dtype=dtype)
            for section, own in self.dtypes.items()
            if own == usual
        }
        return replace(self, platform=name, **engines)


@dataclass(frozen=True)
class RunConfig(TrainingConfig):
    """Settings of an RL run: rollouts, rewards and updates of the policy."""

    rollout: VllmConfig = field(default_factory=VllmConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    models: dict[str, ServedModelConfig] = field(default_factory=dict)
    """Models by name that are served beside the policy and never trained, such as judges."""
    prompts_per_step: Annotated[int, Ge(1)] = 32
    """Number of prompts in a step."""
    samples_per_prompt: Annotated[int, Ge(1)] = 8
    """Number of samples for each prompt."""
    samples_every: Annotated[int, Ge(0)] = 10
    """Interval, in steps, at which run_dir/rollouts keeps a few samples. The first, the last and evaluated steps always
    keep some; 0 adds no other step."""
    ignore_versions: bool = False
    """Start with a version of vLLM that this project never ran with, or that does not fit torch, and say so."""
    evaluate: bool = False
    """Evaluate the model on the held-out rows and end: nothing is trained. The model may be a run's checkpoint."""

    def __post_init__(self):
        super().__post_init__()
        self.placement.check_roles(self.roles)
        if self.views_reference:
            self.placement.check_view()
        find_weight_way(self.rollout, get_platform(self.platform), self.placement.colocate)
        if self.placement.colocate:
            self.placement.check_shared(self.rollout, self.models, self.actor.ranks)
        self.algorithm.check_beside(self.critic, self.rollout, self.limits, self.samples_per_prompt, self.distill)
        if self.trains_critic and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"config: critic.warmup_steps={self.critic.warmup_steps} leaves the actor none of steps={self.steps}; "
                "lower --critic.warmup-steps"
            )
        if self.samples_per_step < self.actor.dp * self.algorithm.mini_batches:
            raise ValueError(
                f"config: prompts_per_step x samples_per_prompt = {self.samples_per_step} samples cannot feed "
                f"mini_batches={self.algorithm.mini_batches} on {self.actor.dp} data-parallel ranks; raise "
                "--prompts-per-step or --samples-per-prompt"
            )
        self.actor.check_longest(self.longest)
        if self.prompts_per_step < self.rollout.engines:
            raise ValueError(
                f"config: prompts_per_step={self.prompts_per_step} leaves some of {self.rollout.engines} rollout "
                "engines without work; lower --rollout.engines"
            )
        if self.longest > self.rollout.max_model_len:
            is_own = self.environment.tokens == self.longest
            name = "environment.tokens" if is_own else "max_prompt_tokens + max_new_tokens"
            raise ValueError(
                f"config: {name} = {self.longest} exceeds rollout.max_model_len={self.rollout.max_model_len}; raise "
                f"--rollout.max-model-len or lower {name}"
            )

    def keeps_samples(self, step: int) -> bool:
        return super().keeps_samples(step) or (self.samples_every > 0 and step % self.samples_every == 0)

    @property
    def trains_critic(self) -> bool:
        """Tell whether a critic is trained."""
        return self.critic.train or self.algorithm.parts.advantage == "gae"

    @property
    def image_memory_mb(self) -> int:
        """Most memory in MB of a row's images while a process decodes them."""
        return min(self.actor.image_memory_mb, self.rollout.image_memory_mb)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def rows_per_mini_batch(self) -> int:
        """Number of samples of the largest mini-batch."""
        return -(-self.samples_per_step // self.algorithm.mini_batches)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return max(self.environment.tokens, self.data.max_prompt_tokens + self.rollout.max_new_tokens)

    @property
    def actor_of_run(self) -> MegatronConfig:
        """The actor's settings; unless they set the length of the decay, it ends with the run."""
        steps = self.steps - (self.critic.warmup_steps if self.trains_critic else 0)
        return set_decay(self.actor, steps * self.algorithm.optimizer_steps)

    @property
    def critic_of_run(self) -> MegatronConfig:
        """The actor's settings with the critic's learning rate, and adapters that begin as nothing."""
        lr, optimizer, lora = self.critic.lr, self.actor.optimizer, replace(self.actor.lora, start="")
        share = optimizer.min_lr / optimizer.lr if optimizer.lr else 0.0
        critic = replace(self.actor, lora=lora, optimizer=replace(optimizer, lr=lr, min_lr=lr * share))
        return set_decay(critic, self.steps * self.algorithm.optimizer_steps)

    @property
    def roles(self) -> dict[str, str]:
        """Role -> name or folder of the model, for each training engine."""
        folders = {"actor": self.model}
        if self.algorithm.parts.kl_coef or self.algorithm.reference:
            folders["reference"] = self.algorithm.reference or self.model
        if self.trains_critic:
            folders["critic"] = self.critic.model or self.model
        return folders | {f"{TEACHER}{source}": folder for source, folder in self.distill.teachers.items()}

    @property
    def top_logprobs(self) -> int:
        """Number of likeliest tokens whose logprobs come with each sample, and are known of the trainer's models."""
        return max(self.algorithm.score_centering, self.distill.top_k)

    @property
    def views_reference(self) -> bool:
        """Tell whether the reference is the actor with its adapters off."""
        return bool(self.actor.lora.rank and self.algorithm.parts.kl_coef) and not self.algorithm.reference

    @property
    def shares_base(self) -> bool:
        """Tell whether the critic's weights beside its adapters and head are the actor's, held once."""
        is_apart = "critic" in self.placement.dedicated_devices
        return bool(self.actor.lora.rank) and not is_apart and self.roles.get("critic") == self.model

    @property
    def num_workers(self) -> int:
        """Number of devices that the run's workers hold at once."""
        served = sum(each.devices for each in self.models.values())
        own = 0 if self.placement.colocate else self.rollout.devices + served
        return own + self.actor.ranks * (1 + len(set(self.placement.dedicated_devices)))

    @property
    def worker_groups(self) -> list[tuple[str, int, int, int]]:
        """The groups of workers as in ``TrainingConfig.worker_groups``, without colocated engines."""
        trainers = ["actor", *dict.fromkeys(self.placement.dedicated_devices)]
        engines = {"rollout": self.rollout} | self.models
        sizes = [(f"{name} engines", each.engines, each.tp, 1) for name, each in engines.items()]
        apart = [] if self.placement.colocate else sizes
        return [*apart, *((name, self.actor.ranks, 1, self.actor.tp) for name in trainers)]

    @property
    def takes_floor(self) -> bool:
        """Tell whether the limit on the mean |rollout - trainer logprob| is measured when the run begins."""
        return self.limits.logprob_diff_mean is None

    def find_logprob_limits(self, floor: float | None) -> tuple[float, float]:
        """Return the mean and largest |rollout - trainer logprob| beyond which the run ends.

        Args:
            floor: what rounding does to the first weights: in float32 to the actor's logprobs alone, else the mean
                difference of rollout and trainer. None if it was not measured.
        """
        if self.is_fp32:
            mean, largest = _FP32_LIMITS
            if floor is not None:
                mean = max(mean, _FP32_FLOORS * floor)
        else:
            mean = _MOST if floor is None else min(_MOST, _FLOORS * floor)
            largest = float("inf")
        if self.limits.logprob_diff_mean is not None:
            mean = self.limits.logprob_diff_mean
        if self.limits.logprob_diff_max is not None:
            largest = self.limits.logprob_diff_max
        return mean, largest

    @property
    def importance(self) -> Importance:
        """Kind of importance weight of each token's loss, with ``auto`` resolved."""
        is_off_policy = self.rollout.staleness > 0 or not self.is_fp32
        if (kind := self.algorithm.importance) != "auto":
            return kind
        return "truncated" if is_off_policy else "none"

    @property
    def dtypes(self) -> dict[str, str]:
        """Section of the settings -> type of the weights and activations of its engines."""
        return super().dtypes | {"rollout": self.rollout.dtype}

    @property
    def is_fp32(self) -> bool:
        """Tell whether trainers and rollout engines all compute in float32."""
        return {*self.dtypes.values()} == {"float32"}

    def check_models(self, find: FindModel = find_model, is_whole: bool = True) -> dict[str, ModelSpec]:
        """Return role -> model for every model of the run, checked against the engines that will hold it.

        Args:
            find: returns the folder of a model, given its name.
            is_whole: whether folders have more than config.json, which is checked as well.

        Raises:
            ValueError: an engine cannot hold a model, or a model has fewer tokens than another setting needs.
        """
        specs = {"actor": check_engines(find(self.model), self.platform, self.actor, self.rollout, is_whole)}
        if (top := self.top_logprobs) > (vocab := specs["actor"].vocab):
            key = ("algorithm", "score_centering") if self.algorithm.score_centering else ("distill", "top_k")
            raise ValueError(
                f"config: {'.'.join(key)}={top} is above the {vocab} tokens of the model's vocabulary; lower "
                f"{option(*key)}"
            )
        for role, folder in self.roles.items():
            if role != "actor":
                from rlworker.config.beside_actor import check_beside_actor

                engine = self.actor if role == "critic" else self.actor.base_settings
                specs[role] = check_beside_actor(
                    role,
                    folder,
                    find,
                    actor=specs["actor"],
                    config=engine,
                    platform_name=self.platform,
                    longest=self.longest,
                    is_whole=is_whole,
                )
        return specs
