"""Settings of a run. Every value is checked before Ray, Megatron or vLLM starts."""

from dataclasses import dataclass, field, replace
from typing import Literal

from engines.config import MegatronConfig, VllmConfig
from engines.hf_folder import SafetensorsFolder
from engines.models import ModelSpec
from hardware.platform import get_platform

_LOGPROB_LIMITS = {"float32": (2e-5, 5e-3), "bfloat16": (5e-2, float("inf"))}
"""dtype -> mean and max of |rollout - trainer logprob| beyond which something is wrong rather than rounded."""


@dataclass(frozen=True)
class DataConfig:
    """Rows to learn from."""

    train: str = ""
    """JSONL file: each row has a "prompt" (text or chat messages) and an "answer"."""
    heldout: str = ""
    """JSONL file of the same form, never trained on; empty evaluates nothing."""
    max_prompt_tokens: int = 1024
    """A longer prompt is an error that names its row."""

    def __post_init__(self):
        if self.max_prompt_tokens < 1:
            raise ValueError(f"data: max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is maximised."""

    clip_low: float = 0.2
    """The policy ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """The policy ratio is clipped at 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the starting model; above 0 a reference model runs too."""
    mini_batches: int = 1
    """Optimizer steps per rollout."""

    def __post_init__(self):
        if self.mini_batches < 1:
            raise ValueError(f"algorithm: mini_batches must be at least 1, got {self.mini_batches}")
        for name in ("clip_low", "clip_high", "kl_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"algorithm: {name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class RunConfig:
    """One RL run."""

    model: str = ""
    """Folder of a saved HuggingFace model with its tokenizer."""
    run_dir: str = ""
    """Folder that receives everything the run writes."""
    data: DataConfig = field(default_factory=DataConfig)
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    rollout: VllmConfig = field(default_factory=VllmConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    platform: Literal["cpu"] = "cpu"
    """Kind of machine the engines run on."""
    steps: int = 100
    """Rollouts, each followed by its update."""
    prompts_per_step: int = 32
    """Prompts sampled in a step."""
    samples_per_prompt: int = 8
    """Completions of each prompt."""
    eval_every: int = 0
    """Steps between greedy evaluations on the held-out rows; 0 evaluates before and after only."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    seed: int = 0
    """Decides the order of prompts and every sample."""
    resume: bool = False
    """Go on from the newest checkpoint in run_dir."""
    logprob_diff_mean: float | None = None
    """Largest mean |rollout - trainer logprob| of a step; None takes 2e-5 (float32) or 0.05 (bfloat16)."""
    logprob_diff_max: float | None = None
    """Largest single difference; None takes 5e-3 (float32) or no limit (bfloat16)."""
    ignore_logprob_diff: bool = False
    """Go on, with a warning at each step, where rollout and trainer disagree."""

    def __post_init__(self):
        for name in ("steps", "prompts_per_step", "samples_per_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_every", "save_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"config: {name} must not be negative, got {getattr(self, name)}")
        if self.samples_per_step < self.actor.dp * self.algorithm.mini_batches:
            raise ValueError(
                f"config: prompts_per_step x samples_per_prompt = {self.samples_per_step} samples cannot feed "
                f"{self.algorithm.mini_batches} mini-batches on {self.actor.dp} data-parallel ranks; raise one of them"
            )
        if self.prompts_per_step < self.rollout.engines:
            raise ValueError(
                f"config: prompts_per_step={self.prompts_per_step} leaves some of {self.rollout.engines} rollout "
                "engines without work; lower --rollout.engines"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.rollout.max_model_len:
            raise ValueError(
                f"config: max_prompt_tokens + max_new_tokens = {longest} exceeds "
                f"rollout.max_model_len={self.rollout.max_model_len}; raise it or lower one of them"
            )

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def actor_of_run(self) -> MegatronConfig:
        """The actor's settings with a decay over the whole run where no other length was asked for."""
        whole = max(self.steps * self.algorithm.mini_batches, self.actor.lr_warmup_steps + 1)
        return replace(self.actor, lr_decay_steps=self.actor.lr_decay_steps or whole)

    @property
    def with_reference(self) -> bool:
        return self.algorithm.kl_coef > 0

    @property
    def actors(self) -> int:
        """Ray actors that the run needs at once."""
        return self.rollout.engines + self.actor.ranks * (2 if self.with_reference else 1)

    @property
    def logprob_limits(self) -> tuple[float, float]:
        """Mean and max of |rollout - trainer logprob| that stop the run."""
        mean, largest = _LOGPROB_LIMITS["float32" if self._is_fp32 else "bfloat16"]
        given = self.logprob_diff_mean, self.logprob_diff_max
        return (mean if given[0] is None else given[0], largest if given[1] is None else given[1])

    @property
    def _is_fp32(self) -> bool:
        return self.actor.dtype == self.rollout.dtype == "float32"

    def check_model(self) -> ModelSpec:
        """Read the model's config and the names of its weights, and check that both engines can hold it.

        Raises:
            ValueError: they cannot.
        """
        model = ModelSpec.from_folder(self.model)
        self.actor.check_model(model)
        self.rollout.check_model(model)
        head_dims = get_platform(self.platform).rollout_head_dims
        if model.head_dim not in head_dims:
            raise ValueError(
                f"rollout: vLLM on platform {self.platform!r} has no attention for the model's head_dim "
                f"{model.head_dim}, expected one of {list(head_dims)}"
            )
        SafetensorsFolder(model.folder).check(model)
        return model
