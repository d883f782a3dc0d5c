"""Settings of training engines, checked when they are built and before anything heavy starts."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from engines.config.lora import LoraConfig
from engines.config.passed import check_passed
from engines.models.spec import ModelSpec
from engines.models.weight import Part, Way
from engines.validation import FINITE, PassThrough, check_types
from hardware.attention.capabilities import check_override
from hardware.attention.rules import compute_slot_unit

if TYPE_CHECKING:  # models without experts load nothing of them
    from hardware.megatron.mixture import Experts


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
    ep: Annotated[int, Ge(1)] = 1
    """Expert-parallel size: ranks of tp, cp and data parallelism that share out the experts of a layer."""
    etp: Annotated[int, Ge(1)] = 1
    """Ranks that each expert itself is cut over."""
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
    lora: LoraConfig = field(default_factory=LoraConfig)
    image_memory_mb: Annotated[int, Ge(1)] = 1024
    """Memory for the decoded images of one process, in MB; images beyond it wait."""
    freeze: tuple[Part, ...] = ()
    """Parts of the model to freeze: their weights do not change. Routers of experts are a part of the language model
    too."""
    router_bias_rate: Annotated[float, Ge(0), FINITE] = 0.0
    """How far an expert's bias moves after an optimizer step: up where its load is below the mean, down where above.
    0 leaves biases as they are. A model whose experts have no bias is refused with any other value."""
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
        if self.ranks % (spread := self.pp * self.ep * self.etp):
            raise ValueError(
                f"actor: pp={self.pp} x ep={self.ep} x etp={self.etp} needs a multiple of {spread} ranks, got "
                f"{self.ranks}; set --actor.ranks or lower --actor.ep or --actor.etp"
            )
        if self.slots % (unit := compute_slot_unit(self.tp, self.cp, self.pad_to_multiple_of)):
            raise ValueError(
                f"actor: slots={self.slots} must be a multiple of {unit}, which tp={self.tp}, cp={self.cp} and "
                f"pad_to_multiple_of={self.pad_to_multiple_of} cut it into; set --actor.slots "
                f"{-(-self.slots // unit) * unit}"
            )
        if self.share in ("prompts", "tree") and self.layout == "bshd":
            raise ValueError(
                f"actor: share={self.share} computes common beginnings of sequences once, which layout=bshd cannot; "
                "set --actor.layout thd, or leave --actor.share out"
            )
        check_override(self.attention_override)
        if self.lora.rank and (self.freeze or self.router_bias_rate):
            name = "freeze" if self.freeze else "router_bias_rate"
            undone = "--actor.freeze without a value" if self.freeze else "--actor.router-bias-rate 0"
            raise ValueError(
                f"actor: lora.rank={self.lora.rank} keeps all weights and trains adapters beside them, which "
                f"{name}={getattr(self, name)} contradicts; leave --actor.lora.rank out, or set {undone}, which takes "
                "back what a recipe sets"
            )
        check_passed("megatron", self.megatron)
        for name in self.router_losses:
            value = self.megatron[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ValueError(
                    f"actor: --actor.megatron has {name} {value!r}, expected a number of at least 0; leave it out for 0"
                )

    @property
    def router_losses(self) -> list[str]:
        """Coefficients of a router's losses that are passed on to Megatron."""
        return [name for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if name in self.megatron]

    @property
    def dp(self) -> int:
        """Data-parallel size: the number of replicas of the model."""
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def cut_sizes(self) -> dict[Way, int]:
        """Number of ranks over which each way cuts a parameter."""
        return {"tp": self.tp, "ep": self.ep, "etp": self.etp}

    @property
    def base_settings(self) -> "MegatronConfig":
        """The same settings for a model that has no adapters, as a teacher's."""
        return replace(self, lora=LoraConfig())

    def freezes(self, part: Part, is_head: bool = False) -> bool:
        """Tell whether the weights of a part do not change.

        Args:
            is_head: they are of a critic's head, which is new and always learns.
        """
        if is_head or self.lora.rank:
            return not is_head
        return part in self.freeze or (part == "router" and "language" in self.freeze)

    def check_longest(self, longest: int) -> None:
        """Raise ValueError if a fixed number of slots cannot hold the longest sequence without its last token."""
        unit = compute_slot_unit(self.tp, self.cp, self.pad_to_multiple_of)
        need = -(-(longest - 1) // unit) * unit
        if 0 < self.slots < need:
            raise ValueError(
                f"actor: slots={self.slots} does not hold the longest sequence, {longest} tokens, which takes {need}; "
                "raise --actor.slots or leave it out"
            )

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError if the parallel sizes do not divide the model, or ``freeze`` leaves nothing to learn."""
        # Projections are cut by rows where ranks share a key-value head. The hidden size is not cut.
        rows = (model.heads * (1 + model.gates_output) + 2 * model.kv_heads) * model.head_dim
        sizes = {"attention heads": model.heads} | model.mlp_widths | {"rows of queries, keys and values": rows}
        sizes |= model.mixer_cuts
        for name, value in sizes.items():
            if value % self.tp:
                raise ValueError(f"actor: tp={self.tp} does not divide the model's {value} {name}; lower --actor.tp")
        if not model.shares_kv_heads(self.tp):
            raise ValueError(
                f"actor: tp={self.tp} is neither a divisor nor a multiple of the model's {model.kv_heads} key-value "
                "heads; change --actor.tp"
            )
        if model.gates_output and self.tp > model.kv_heads:
            raise ValueError(
                f"actor: tp={self.tp} is above the model's {model.kv_heads} key-value heads, which Megatron does not "
                "share among ranks where outputs have gates; lower --actor.tp"
            )
        if model.experts:
            self._check_experts(model.experts, model.hidden)
        if (self.tp - 1) * -(-model.vocab // self.tp) >= model.vocab:
            raise ValueError(
                f"actor: tp={self.tp} leaves a rank none of the model's {model.vocab} tokens; lower --actor.tp"
            )
        if {"vision", "projector"} & {*self.freeze} and not model.vision:
            raise ValueError(
                f"actor: freeze={self.freeze} names parts of models with vision, and this is none; leave them out of "
                "--actor.freeze"
            )
        self.lora.check_model(model, self.pp)
        if self.lora.rank and "experts" in self.lora.targets:
            unit = 16 // (4 if self.dtype == "float32" else 2)  # products of experts take rows of whole 16 bytes
            if self.etp > 1 or self.lora.rank % unit:
                raise ValueError(
                    f"actor: lora.targets names experts at etp={self.etp} and lora.rank={self.lora.rank}, expected "
                    f"etp=1 and a multiple of {unit}; change --actor.etp and --actor.lora.rank"
                )
        if not self.lora.rank and all(self.freezes(weight.part, weight.is_head) for weight in model.weights.values()):
            raise ValueError("actor: freeze of all parts leaves nothing to learn; leave one out of --actor.freeze")
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

    def check_spread(self, model: ModelSpec) -> None:
        """Raise ValueError if settings of experts would do nothing in the actor; a model beside it may have none."""
        self._check_routers(model)
        if self.ep * self.etp > 1 and not model.experts:
            raise ValueError(
                f"actor: ep={self.ep} and etp={self.etp} spread experts, and the model has none; leave --actor.ep and "
                "--actor.etp out"
            )
        if self.router_losses and not model.experts:
            raise ValueError(
                f"actor: --actor.megatron has {self.router_losses[0]}, and the model has no router; leave it out"
            )

    def _check_routers(self, model: ModelSpec) -> None:
        """Raise ValueError if settings of routers would do nothing."""
        if "router" in self.freeze and not model.experts:
            raise ValueError(
                "actor: freeze names 'router', and the model has no experts; leave it out of --actor.freeze"
            )
        if not self.router_bias_rate:
            return
        if not model.experts or not model.experts.has_bias:
            raise ValueError(
                f"actor: router_bias_rate={self.router_bias_rate} moves biases of experts, and the model has none; "
                "leave --actor.router-bias-rate out"
            )
        if self.freezes("router"):
            raise ValueError(
                f"actor: router_bias_rate={self.router_bias_rate} moves biases, and freeze={self.freeze} keeps them; "
                "leave --actor.router-bias-rate or --actor.freeze out"
            )

    def _check_experts(self, experts: "Experts", hidden: int) -> None:
        """Raise ValueError if the experts cannot be cut so, or torch has no grouped product of an expert's part."""
        for name, size, value in (("ep", self.ep, experts.count), ("etp", self.etp, experts.ffn)):
            if value % size:
                what = "experts" if name == "ep" else "experts' ffn size"
                raise ValueError(
                    f"actor: {name}={size} does not divide the model's {value} {what}; lower --actor.{name}"
                )
        # "strides should be multiple of 16 bytes" (torch 2.13, grouped_mm)
        columns = {"float32": 4, "bfloat16": 8}[self.dtype]
        for name, width in (("part of an expert", experts.ffn // self.etp), ("hidden size", hidden)):
            if width % columns:
                advice = "lower --actor.etp or set --actor.dtype float32" if not width % 4 else "lower --actor.etp"
                raise ValueError(
                    f"actor: dtype={self.dtype} needs a multiple of {columns} columns of each expert, and the {name} "
                    f"has {width}; {advice}"
                )
