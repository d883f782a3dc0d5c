"""Settings of rollout engines and of sampling, checked when they are built and before anything heavy starts."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from engines.config.passed import check_passed
from engines.models.spec import ModelSpec
from engines.validation import FINITE, PassThrough, check_numbers, check_types
from hardware.attention.rollouts import check_rollout_override
from hardware.platform import Platform
from hardware.vllm_versions import SENDERS

MOST_KEPT = 1024
"""Largest top_k, since all kept ids travel with every sampled token."""

VLLM_VOCAB_UNIT = 64
"""Multiple to which vLLM pads a vocabulary before it cuts it (0.32, layers/vocab_parallel_embedding.py)."""

VLLM_BATCHED_TOKENS = 4096
"""vLLM's default for the most tokens of a forward pass on a CPU (0.32, engine/arg_utils.py)."""


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
        """Raise ValueError if a setting of the sampling is out of range, or needs another setting."""
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
            raise ValueError(
                "rollout: stop has an empty text, which ends every completion; remove it from --rollout.stop"
            )


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
    """Size of the KV cache on each device, in MB. 0 takes the platform's: 1 GiB on a CPU, 16 GiB on CUDA and NPUs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; the default is the platform's."""
    image_memory_mb: Annotated[int, Ge(1)] = 8192
    """Memory for the decoded images of one engine, in MB; prompts with images beyond it wait."""
    staleness: Annotated[int, Ge(0), Le(8)] = 0
    """Largest number of updates between the weights that sample a token and the weights that learn from it. 0 samples
    and learns in turns; above 0 rollouts run ahead of the trainer."""
    attention_override: tuple[str, ...] = ()
    """Refused cells of the rollouts' capability table to use all the same, as backend/rule."""
    weight_transfer: str = "auto"
    """Way of new weights to the engines: auto takes the platform's, host takes Ray. Backends of vLLM's weight transfer
    are nccl, ipc with placement.colocate, and gloo on a CPU."""
    replay_routes: bool = False
    """Give the trainer the experts of every token, so that it computes a mixture by the sampler's choices."""
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
        check_passed("vllm", self.vllm)
        if self.spreads_experts and self.tp == 1:
            raise ValueError(
                "rollout: --rollout.vllm enable_expert_parallel shares out experts over the devices of an engine, "
                "which are rollout.tp=1; raise --rollout.tp, or leave it out"
            )
        batched = self.vllm.get("max_num_batched_tokens", VLLM_BATCHED_TOKENS)
        if isinstance(batched, int) and self.max_num_seqs > batched:
            raise ValueError(
                f"rollout: max_num_seqs={self.max_num_seqs} is above vLLM's max_num_batched_tokens={batched}; lower "
                "--rollout.max-num-seqs or set --rollout.vllm max_num_batched_tokens"
            )

    @property
    def devices(self) -> int:
        """Number of devices of all engines."""
        return self.engines * self.tp

    @property
    def spreads_experts(self) -> bool:
        """Tell whether each device of an engine has some of the experts whole, and not a part of each."""
        return bool(self.vllm.get("enable_expert_parallel"))

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError if vLLM would refuse the model, or compute it in another way than the trainer."""
        self.check_cut(model)
        if self.top_k > model.vocab:
            raise ValueError(
                f"rollout: top_k={self.top_k} is above the {model.vocab} tokens of the model's vocabulary; lower "
                "--rollout.top-k"
            )
        if self.replay_routes and not model.experts:
            raise ValueError(
                "rollout: replay_routes needs a model with experts, and this one has none; leave "
                "--rollout.replay-routes out"
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
        """Raise ValueError if the devices of an engine cannot hold equal parts of the model."""
        sizes = {
            "attention heads": model.heads,
            "padded vocabulary": -(-model.vocab // VLLM_VOCAB_UNIT) * VLLM_VOCAB_UNIT,
        }
        sizes |= model.mlp_widths
        if self.spreads_experts and not model.experts:
            raise ValueError(
                "rollout: --rollout.vllm enable_expert_parallel shares out experts, and the model has none; leave it "
                "out"
            )
        if model.experts:
            count, ffn = model.experts.count, model.experts.ffn
            sizes |= {"experts": count} if self.spreads_experts else {"experts' ffn size": ffn}
        sizes |= model.mixer_cuts
        if model.vision:
            sizes |= {"vision tower's heads": model.vision.heads, "vision tower's ffn size": model.vision.ffn}
        for name, size in sizes.items():
            if size % self.tp:
                raise ValueError(f"rollout: tp={self.tp} does not divide the model's {size} {name}; lower --rollout.tp")
        if not model.shares_kv_heads(self.tp):
            raise ValueError(
                f"rollout: tp={self.tp} is neither a divisor nor a multiple of the model's {model.kv_heads} key-value "
                "heads; change --rollout.tp"
            )

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


def find_weight_way(config: VllmConfig, platform: Platform, colocated: bool) -> str:
    """Return the way of new weights to the engines, of ``Platform.find_weight_ways``.

    Args:
        colocated: whether the engines share devices with the trainers.

    Raises:
        ValueError: the platform has no way of that name there.
    """
    ways = platform.find_weight_ways(colocated)
    if config.weight_transfer not in ("auto", *ways):
        lack = "" if SENDERS.is_there else f" ({SENDERS.explain()})"
        raise ValueError(
            f"rollout: weight_transfer={config.weight_transfer!r} is no way of weights on platform {platform.name!r} "
            f"{'with' if colocated else 'without'} placement.colocate, expected auto or one of {list(ways)}{lack}; "
            "change --rollout.weight-transfer"
        )
    return ways[0] if config.weight_transfer == "auto" else config.weight_transfer


@dataclass(frozen=True)
class ServedModelConfig:
    """A model that environments ask by its name: a judge writes a verdict, a classifier gives a number."""

    model: str = ""
    """Folder of a saved HuggingFace model with its tokenizer, or hf:ORG/NAME, as for the policy."""
    kind: Literal["judge", "classifier"] = "judge"
    """A judge is a chat model. A classifier is a sequence classification, or a token classification that scores every
    token."""
    template: str = ""
    """File of a judge, in TOML: the prompt and the form of the verdict. docs/rewards.md explains its keys."""
    label: str = ""
    """Label of a classifier whose logit is the score; a classifier with one label needs none."""
    engines: Annotated[int, Ge(1)] = 1
    """Number of vLLM engines of this model; their dtype and KV cache are those of the rollouts."""
    tp: Annotated[int, Ge(1)] = 1
    """Tensor-parallel size: devices of each engine."""
    max_model_len: Annotated[int, Ge(1)] = 2048
    """Longest question, with a judge's answer, in tokens. A longer one has no verdict."""
    weight: Annotated[float, FINITE] = 1.0
    """Weight of its verdict in the reward of combine_parts."""

    def __post_init__(self):
        check_types("models.NAME", self)

    def check(self, name: str) -> None:
        """Raise ValueError where the settings of the model called ``name`` do not fit each other."""
        section = f"models.{name}"
        if not self.model:
            raise ValueError(f"{section}: no model was given; set --{section}.model to a folder or hf:ORG/NAME")
        if self.kind == "judge" and not self.template:
            raise ValueError(
                f"{section}: a judge needs a file with its prompt and the form of its verdict; set "
                f"--{section}.template, or --{section}.kind classifier"
            )
        if self.kind == "judge" and self.label:
            raise ValueError(f"{section}: label={self.label!r} is of classifiers, and kind is judge; leave it out")
        if self.kind == "classifier" and self.template:
            raise ValueError(
                f"{section}: template={self.template!r} is of judges, and kind is classifier, whose prompt comes from "
                "its own chat template; leave it out"
            )

    @property
    def devices(self) -> int:
        """Number of devices of all engines."""
        return self.engines * self.tp
