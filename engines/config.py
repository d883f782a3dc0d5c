"""Settings of the engines, checked when they are built and before anything heavy starts."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt

from engines.models.spec import ModelSpec
from engines.models.weight import Part, Way
from engines.validation import FINITE, PassThrough, check_numbers, check_types
from hardware.attention.capabilities import check_override
from hardware.attention.rollouts import check_rollout_override
from hardware.attention.rules import compute_slot_unit

MOST_KEPT = 1024
"""Largest top_k: so many ids may travel with every sampled token."""

VLLM_VOCAB_UNIT = 64
"""vLLM pads a vocabulary to a multiple of this before it cuts it (0.32, layers/vocab_parallel_embedding.py)."""

VLLM_BATCHED_TOKENS = 4096
"""vLLM's default of tokens in one forward pass on a CPU (0.32, engine/arg_utils.py)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the schedule of its learning rate."""

    lr: Annotated[float, Ge(0), FINITE] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Ge(0), FINITE] = 0.0
    """Learning rate after the decay."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    lr_warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps of linear warm-up from zero."""
    lr_decay_steps: Annotated[int, Ge(0)] = 0
    """Optimizer step at which the decay ends; 0 decays over the whole run."""
    weight_decay: Annotated[float, Ge(0), FINITE] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the mean of gradients, per step."""
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of the mean of squared gradients, per step."""
    adam_eps: Annotated[float, Gt(0), FINITE] = 1e-8
    """Constant that AdamW adds to the root of the mean of squared gradients."""
    clip_grad: Annotated[float, Ge(0), FINITE] = 1.0
    """Largest global gradient norm; 0 does not clip."""
    offload_fraction: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the optimizer state (fp32 masters and moments) that is offloaded to the host and stepped there."""

    def __post_init__(self):
        check_types("actor.optimizer", self)
        if self.min_lr > self.lr:
            raise ValueError(
                f"actor.optimizer: min_lr must be at most lr={self.lr}, got {self.min_lr}; lower "
                "--actor.optimizer.min-lr"
            )
        if 0 < self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"actor.optimizer: lr_decay_steps={self.lr_decay_steps} must be above "
                f"lr_warmup_steps={self.lr_warmup_steps}; raise --actor.optimizer.lr-decay-steps"
            )


@dataclass(frozen=True)
class MegatronConfig:
    """The training engine: its parallel sizes, the layout of its micro-batches, its optimizer."""

    ranks: Annotated[int, Ge(1)] = 1
    """Number of training processes; the data-parallel size is ranks / (tp x pp x cp)."""
    tp: Annotated[int, Ge(1)] = 1
    """Tensor-parallel size, with sequence parallelism."""
    pp: Annotated[int, Ge(1)] = 1
    """Pipeline-parallel size."""
    cp: Annotated[int, Ge(1)] = 1
    """Context-parallel size."""
    layout: Literal["thd", "bshd"] = "thd"
    """Layout of a micro-batch: thd packs sequences end to end, bshd gives each sequence a padded row."""
    pad_to_multiple_of: Annotated[int, Ge(1)] = 1
    """A context-parallel rank's share of each sequence is padded to a multiple of this (16 for FP8, 32 for MXFP8)."""
    slots: Annotated[int, Ge(0)] = 0
    """Fixed size of every micro-batch in slots (thd: in all; bshd: of each row); 0 lets the size vary."""
    attention_override: tuple[str, ...] = ()
    """Cells of the capability table that are refused and used all the same, such as npu_mode2/thd/no-cp/chunk."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; the default is the platform's. The optimizer keeps fp32 masters."""
    micro_batch_tokens: Annotated[int, Ge(1)] = 16384
    """Largest micro-batch of a replica in slots, padding included; a longer sequence has a micro-batch of its own."""
    recompute: Literal["none", "core", "full"] = "none"
    """Recompute nothing, the core attention or whole layers in the backward pass."""
    share: Literal["auto", "none", "prompts", "tree"] = "auto"
    """Beginnings that sequences of a thd micro-batch share and that are computed once: none, prompts, or any (tree).
    The default auto shares prompts where the project has run the platform."""
    deterministic: bool = False
    """Use deterministic kernels, so that a repeated run is equal bit by bit; slower. A CPU always does."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    image_memory_mb: Annotated[int, Ge(1)] = 1024
    """Memory for the decoded images of one process, in MB; images beyond it wait."""
    freeze: tuple[Part, ...] = ()
    """Parts of a vision-language model to freeze: their weights do not change."""
    timeout_s: Annotated[int, Ge(1), Le(10**9)] = 600
    """Seconds that a collective may wait for another rank before the run fails."""
    megatron: PassThrough = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig; fields that the engine sets itself are refused."""

    def __post_init__(self):
        check_types("actor", self)
        model_parallel = self.tp * self.pp * self.cp
        if self.ranks % model_parallel:
            raise ValueError(
                f"actor: tp={self.tp} x pp={self.pp} x cp={self.cp} needs a multiple of {model_parallel} ranks, got "
                f"{self.ranks}; set --actor.ranks or lower --actor.tp, --actor.pp or --actor.cp"
            )
        if self.slots % (unit := compute_slot_unit(self.tp, self.cp, self.pad_to_multiple_of)):
            raise ValueError(
                f"actor: slots={self.slots} must be a multiple of {unit}, which tp={self.tp}, cp={self.cp} and "
                f"pad_to_multiple_of={self.pad_to_multiple_of} cut it into; set --actor.slots "
                f"{-(-self.slots // unit) * unit}"
            )
        if self.share in ("prompts", "tree") and self.layout == "bshd":
            raise ValueError(
                f"actor: share={self.share} needs slots that sequences have in common, and rows of layout=bshd have "
                "none; set --actor.layout thd, or leave --actor.share out"
            )
        check_override(self.attention_override)
        if self.megatron:
            from engines.pass_through import check_pass_through

            check_pass_through("megatron", self.megatron)

    @property
    def dp(self) -> int:
        """Data-parallel size: replicas of the model."""
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def cut_sizes(self) -> dict[Way, int]:
        """Ranks over which each way cuts a parameter."""
        return {"tp": self.tp}

    def check_longest(self, longest: int) -> None:
        """Raise ValueError where a fixed number of slots does not hold the longest sequence; its last token is no
        input."""
        unit = compute_slot_unit(self.tp, self.cp, self.pad_to_multiple_of)
        need = -(-(longest - 1) // unit) * unit
        if 0 < self.slots < need:
            raise ValueError(
                f"actor: slots={self.slots} does not hold the longest sequence, {longest} tokens, which takes {need}; "
                "raise --actor.slots or leave it out"
            )

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError where the parallel sizes do not divide the model, or nothing is left to learn."""
        # Megatron can also share a key-value head among ranks; no test of ours runs that. The hidden size is not cut.
        for name, value in (
            ("attention heads", model.heads),
            ("key-value heads", model.kv_heads),
            ("ffn size", model.ffn),
        ):
            if value % self.tp:
                raise ValueError(f"actor: tp={self.tp} does not divide the model's {value} {name}; lower --actor.tp")
        if (self.tp - 1) * -(-model.vocab // self.tp) >= model.vocab:
            raise ValueError(
                f"actor: tp={self.tp} leaves a rank none of the model's {model.vocab} tokens; lower --actor.tp"
            )
        if self.freeze and not model.vision:
            raise ValueError(f"actor: freeze={self.freeze} names parts of a vision-language model; leave it out")
        if set(self.freeze) == set(get_args(Part)):
            raise ValueError("actor: freeze leaves nothing to learn; leave one part out")
        if "language" in self.freeze and self.pp > 1:
            raise ValueError(f"actor: freeze=language leaves stages of pp={self.pp} nothing to learn; set --actor.pp 1")
        if model.layers % self.pp:
            raise ValueError(
                f"actor: pp={self.pp} does not divide the model's {model.layers} layers; change --actor.pp"
            )
        if model.vision and (levels := model.vision.deepstack) > model.layers // self.pp:
            fewer = [n for n in range(1, self.pp) if not model.layers % n and model.layers // n >= levels]
            advice = f"set --actor.pp {max(fewer)}" if fewer else "the model has fewer layers than that"
            raise ValueError(
                f"actor: pp={self.pp} leaves the first stage {model.layers // self.pp} layers, and image features are "
                f"added after the first {levels}; {advice}"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """The sampling of completions: their distribution, and where they end."""

    max_new_tokens: Annotated[int, Ge(1)] = 256
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature, from 0.01 to 2; the trainer divides its logits by it too."""
    top_k: Annotated[int, Ge(0), Le(MOST_KEPT)] = 0
    """Number of likeliest ids that may be sampled; 0 keeps all. The kept ids come with each sampled token, and the
    trainer's logprobs and entropy are of these alone."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Of the ids that top_k keeps: the likeliest, whose probability together reaches top_p."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Ids that are less likely than min_p times the likeliest are not sampled; with top_k."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, of one token or several. A stop text is sampled and trained, and left out of the
    text that rewards read."""
    min_new_tokens: Annotated[int, Ge(0)] = 0
    """Shortest completion, in tokens; with top_k. Until then no token and no text ends it."""
    ignore_eos: bool = False
    """Sample on past the tokens that end an answer, up to max_new_tokens."""

    def check_sampling(self) -> None:
        """Raise ValueError where a setting of the sampling cannot be, or needs another."""
        # Below vLLM samples at 0.01 (0.32, sampling_params), or greedily; above it refuses.
        rule = "from 0.01 to 2, which vLLM takes (a greedy policy has no gradient)"
        check_numbers("rollout", self, rule, lambda x: 0.01 <= x <= 2, "temperature")
        if not self.top_k and (self.top_p < 1 or self.min_p):
            name, value = ("top_p", self.top_p) if self.top_p < 1 else ("min_p", self.min_p)
            raise ValueError(
                f"rollout: {name}={value} keeps as many ids as it takes, and those of every token travel to the "
                "trainer, which needs a limit on them; set --rollout.top-k too, such as 50"
            )
        if self.min_new_tokens and not self.top_k:
            raise ValueError(
                f"rollout: min_new_tokens={self.min_new_tokens} takes the tokens that end an answer from the sampled "
                "distribution, which the trainer follows by the ids that were kept; set --rollout.top-k too, such as 50"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout: min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; lower "
                "--rollout.min-new-tokens"
            )
        if "" in self.stop:
            raise ValueError("rollout: stop has an empty text, which ends every completion; leave it out")


@dataclass(frozen=True)
class VllmConfig(SamplingConfig):
    """The rollout engines: vLLM, its sizes and its sampling."""

    engines: Annotated[int, Ge(1)] = 1
    """Number of vLLM engines; the prompts of a step are split over them."""
    tp: Annotated[int, Ge(1)] = 1
    """Tensor-parallel size: devices of each engine."""
    max_model_len: Annotated[int, Ge(1)] = 2048
    """Longest sequence, prompt and completion together, in tokens."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Largest number of sequences that an engine decodes at once."""
    kv_cache_mb: Annotated[int, Ge(0)] = 0
    """Size of the KV cache on each device, in MB; 0 leaves it to vLLM (1 GiB on a CPU)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; the default is the platform's."""
    image_memory_mb: Annotated[int, Ge(1)] = 8192
    """Memory for the decoded images of one engine, in MB; prompts with images beyond it wait."""
    staleness: Annotated[int, Ge(0), Le(8)] = 0
    """Largest number of updates between the weights that sample a token and the weights that learn from it. 0 samples
    and learns in turns; above 0 rollouts run ahead of the trainer."""
    attention_override: tuple[str, ...] = ()
    """Refused cells of the rollouts' capability table to use all the same, as backend/rule."""
    vllm: PassThrough = field(default_factory=dict)
    """Further arguments of vLLM's LLM; arguments that change the sampled distribution are refused."""

    def __post_init__(self):
        check_types("rollout", self)
        self.check_sampling()
        check_rollout_override(self.attention_override)
        if self.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"rollout: max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"max_model_len={self.max_model_len}; raise --rollout.max-model-len"
            )
        if "pipeline_parallel_size" in self.vllm:
            raise ValueError(
                "rollout: --rollout.vllm may not set pipeline_parallel_size: on a CPU vLLM starts with it and fails at "
                "the first request, and elsewhere no devices are set aside for it; set --rollout.tp"
            )
        if self.vllm:
            from engines.pass_through import check_pass_through

            check_pass_through("vllm", self.vllm)
        batched = self.vllm.get("max_num_batched_tokens", VLLM_BATCHED_TOKENS)
        if isinstance(batched, int) and self.max_num_seqs > batched:
            raise ValueError(
                f"rollout: max_num_seqs={self.max_num_seqs} is above vLLM's max_num_batched_tokens={batched}; lower "
                "--rollout.max-num-seqs or set --rollout.vllm max_num_batched_tokens"
            )

    @property
    def devices(self) -> int:
        """Devices of all engines."""
        return self.engines * self.tp

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError where vLLM would refuse the model, or compute it otherwise than the trainer."""
        self.check_cut(model)
        if self.top_k > model.vocab:
            raise ValueError(
                f"rollout: top_k={self.top_k} is above the {model.vocab} tokens of the model's vocabulary; lower "
                "--rollout.top-k"
            )
        if self.max_model_len > model.max_positions:
            raise ValueError(
                f"rollout: max_model_len={self.max_model_len} is above the model's {model.max_positions} positions; "
                "lower --rollout.max-model-len"
            )
        if any(rule.images for rule in model.rules):
            self._check_whole_prompts()
        if len({rule.window for rule in model.rules}) > 1 and not model.family.mixes_windows:
            raise ValueError(
                f"rollout: the model has a sliding_window on some layers and none on others, which vLLM does not do "
                f"for {model.model_type}; set max_window_layers in its config.json to 0 or use_sliding_window to false"
            )

    def check_cut(self, model: ModelSpec) -> None:
        """Raise ValueError where the devices of an engine cannot take equal parts of the model."""
        # vLLM can also give a key-value head to several devices; no test of ours runs that.
        sizes = {
            "attention heads": model.heads,
            "key-value heads": model.kv_heads,
            "ffn size": model.ffn,
            "padded vocabulary": -(-model.vocab // VLLM_VOCAB_UNIT) * VLLM_VOCAB_UNIT,
        }
        if model.vision:
            sizes |= {"vision tower's heads": model.vision.heads, "vision tower's ffn size": model.vision.ffn}
        for name, size in sizes.items():
            if size % self.tp:
                raise ValueError(f"rollout: tp={self.tp} does not divide the model's {size} {name}; lower --rollout.tp")

    def _check_whole_prompts(self) -> None:
        """Raise ValueError where vLLM would compute a prompt in parts, which may cut an image."""
        if self.vllm.get("enable_chunked_prefill"):
            raise ValueError(
                "rollout: --rollout.vllm enable_chunked_prefill would cut images, whose tokens see each other both "
                "ways in this model; leave it out"
            )
        if threshold := self.vllm.get("long_prefill_token_threshold"):  # vLLM cuts at it without chunked prefill too
            raise ValueError(
                f"rollout: --rollout.vllm long_prefill_token_threshold {threshold} would cut images, whose tokens see "
                "each other both ways in this model; leave it out"
            )
        budget = self.vllm.get("max_num_batched_tokens", self.max_model_len)
        if isinstance(budget, int) and budget < self.max_model_len:
            raise ValueError(
                f"rollout: --rollout.vllm max_num_batched_tokens {budget} is below --rollout.max-model-len "
                f"{self.max_model_len}, and this model's prompts are computed whole: a part of one could end within "
                "an image; raise it, or lower --rollout.max-model-len"
            )
