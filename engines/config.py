"""Settings of the engines, checked when they are built and before anything heavy starts."""

from dataclasses import dataclass, field
from typing import Literal

from engines.models import ModelSpec

PassThrough = dict[str, int | float | bool | str]


@dataclass(frozen=True)
class MegatronConfig:
    """The training engine: how it is spread over ranks and how it steps."""

    ranks: int = 1
    """Processes in all; data parallelism takes what tp, pp and cp leave."""
    tp: int = 1
    """Tensor-parallel size, with sequence parallelism."""
    pp: int = 1
    """Pipeline-parallel size."""
    cp: int = 1
    """Context-parallel size."""
    layout: Literal["thd", "bshd"] = "thd"
    """thd lays sequences end to end, bshd one a row."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; the optimizer keeps fp32 masters."""
    micro_batch_tokens: int = 16384
    """Most tokens in one forward pass of a replica."""
    recompute: Literal["none", "core", "full"] = "none"
    """Recompute nothing, the core attention or whole layers in the backward pass."""
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    lr_decay_steps: int = 0
    """Optimizer step at which min_lr is reached; 0 takes the whole run (an RL run knows its length)."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    timeout_s: int = 600
    """How long a collective may wait for another rank."""
    megatron: PassThrough = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig."""

    def __post_init__(self):
        sizes = f"tp={self.tp} x pp={self.pp} x cp={self.cp}"
        for name in ("ranks", "tp", "pp", "cp", "micro_batch_tokens", "timeout_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"actor: {name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(
                f"actor: min_lr must lie between 0 and lr={self.lr}, got {self.min_lr}; lower --actor.min-lr"
            )
        for name in ("lr_warmup_steps", "lr_decay_steps", "weight_decay", "clip_grad"):
            if getattr(self, name) < 0:
                raise ValueError(f"actor: {name} must not be negative, got {getattr(self, name)}")
        model_parallel = self.tp * self.pp * self.cp
        if self.ranks % model_parallel:
            raise ValueError(
                f"actor: {sizes} needs a multiple of {model_parallel} ranks, got {self.ranks}; "
                "set --actor.ranks or lower --actor.tp, --actor.pp or --actor.cp"
            )
        if 0 < self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"actor: lr_decay_steps={self.lr_decay_steps} must be above lr_warmup_steps={self.lr_warmup_steps}"
            )

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError where the model cannot be cut as asked."""
        for name, value in (
            ("attention heads", model.heads),
            ("key-value heads", model.kv_heads),
            ("ffn size", model.ffn),
        ):
            if value % self.tp:
                raise ValueError(f"actor: tp={self.tp} does not divide the model's {value} {name}; lower --actor.tp")
        if model.layers % self.pp:
            raise ValueError(
                f"actor: pp={self.pp} does not divide the model's {model.layers} layers; change --actor.pp"
            )


@dataclass(frozen=True)
class VllmConfig:
    """The rollout engine."""

    engines: int = 1
    """vLLM engines; prompts are split over them."""
    max_new_tokens: int = 256
    """Longest completion."""
    temperature: float = 1.0
    """Sampling temperature, which the trainer applies to its logprobs too."""
    max_model_len: int = 2048
    """Longest prompt and completion together."""
    max_num_seqs: int = 256
    """Sequences that decode at once."""
    kv_cache_mb: int = 0
    """Memory for keys and values; 0 leaves it to vLLM (1 GiB on a CPU)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    vllm: PassThrough = field(default_factory=dict)
    """Further arguments of vLLM's LLM."""

    def __post_init__(self):
        for name in ("engines", "max_new_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout: {name} must be at least 1, got {getattr(self, name)}")
        if self.kv_cache_mb < 0:
            raise ValueError(f"rollout: kv_cache_mb must not be negative, got {self.kv_cache_mb}")
        if self.temperature <= 0:
            raise ValueError(
                f"rollout: temperature must be above 0, got {self.temperature}; a greedy policy has no gradient"
            )
        if self.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"rollout: max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"max_model_len={self.max_model_len}; raise --rollout.max-model-len"
            )

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError where vLLM would refuse the model."""
        if self.max_model_len > model.max_positions:
            raise ValueError(
                f"rollout: max_model_len={self.max_model_len} is above the model's {model.max_positions} positions; "
                "lower --rollout.max-model-len"
            )
