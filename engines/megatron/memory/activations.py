"""Memory of activations: tensors that forward passes keep for backward passes, and temporary tensors of the latter."""

from collections import Counter
from dataclasses import dataclass

from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from hardware.megatron.form import LayerOptions
from hardware.megatron.kernel_memory import KernelMemory
from hardware.megatron.mixers import FP32, MixedTokens, MixerBytes, RoutedTokens

_GATE = 5
"""Tensors of the MLP's width that are held beside its kept ones in the backward pass of its gate, where layers have
adapters: the gradients of its output, of both factors and of the activation, and the activation; 3 of a fused one."""


@dataclass(frozen=True)
class MicroBatch:
    """The size of a micro-batch.

    Attributes:
        slots: slots over all context-parallel ranks. sequences: number of its sequences.
        routed: rows that come to a rank's experts for each that would come if all experts got equally many.
    """

    slots: int = 0
    sequences: int = 1
    routed: float = 1.0


def get_itemsize(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer's micro-batch on a rank.

    Attributes:
        input: the layer's input. norms, mlp: kept by norms and MLP; late_norms: by norms after core attention.
        mixer: kept by what mixes tokens.
    """

    input: float
    norms: float
    late_norms: float
    mixer: MixerBytes
    mlp: float

    @property
    def whole(self) -> float:
        mixer = self.mixer
        return self.norms + mixer.before + mixer.core + mixer.output + self.mlp


def _count_layer(
    model: ModelSpec, options: LayerOptions, config: MegatronConfig, micro: MicroBatch, kernels: KernelMemory
) -> _Layer:
    """Count the bytes that a layer keeps for its backward pass, tensor by tensor.

    Tensors of the hidden size's width are split over tp by sequence parallelism, all other tensors by heads or columns.
    The MLP keeps the two halves of its projection, the factors of its product (the activation of the first half, and
    the second half), and the product; a fused MLP keeps the projection and the product.
    """
    size, slots = get_itemsize(config.dtype), micro.slots / config.cp / config.tp
    # A norm that scales by 1 + weight computes in fp32 and multiplies by hand: both tensors are kept.
    norm_input = (2 * FP32 if options.norms_from_one else kernels.count_norm_input_bytes(size)) * slots
    by_hand = options.norms_from_one or not kernels.fuses_norms
    if config.lora.rank:  # a frozen norm keeps its input alone, in fp32 where it computes by hand
        norm_input = (FP32 if by_hand else size) * slots
    hidden, ffn = model.hidden * size * slots, model.ffn * size * slots
    tokens = MixedTokens(
        heads=model.attention_heads,
        has_qk_norm=model.qk_norm,
        size=size,
        slots=slots,
        all_slots=micro.slots,
        sequences=micro.sequences,
        recompute=config.recompute,
        layout=config.layout,
        tp=config.tp,
        cp=config.cp,
        norm_input=norm_input,
        kernels=kernels,
    )
    norm = model.hidden * norm_input + hidden
    post_norms = 2 * model.hidden * norm_input if options.post_norms else 0.0  # their outputs are added, not kept
    halves = 3 if kernels.fuses_swiglu and model.activation == "silu" else 5
    mlp = halves * ffn
    if options.experts:
        has_z_loss = bool(config.megatron.get("moe_z_loss_coeff"))
        routed = describe_routed(model, config, micro)
        mlp = options.experts.count_kept(routed, halves=halves, has_z_loss=has_z_loss) * slots
    if config.lora.rank:  # adapters make outputs of norms and activations again, and keep rank numbers of a token
        targets = sum(len(adapter.targets) for adapter in config.lora.list_adapters(model)) / model.layers
        norm = model.hidden * norm_input + (hidden if by_hand and size < FP32 else 0)  # the source in its own type
        mlp += config.lora.rank * targets * size * slots - (0.0 if options.experts or halves == 3 else 3 * ffn)
    return _Layer(
        input=hidden,
        norms=2 * norm + post_norms,
        late_norms=norm + post_norms,
        mixer=options.mixer.count_kept(tokens),
        mlp=mlp,
    )


def describe_routed(model: ModelSpec, config: MegatronConfig, micro: MicroBatch) -> RoutedTokens:
    """Say of which sizes the tokens are that a layer of experts routes."""
    size = get_itemsize(config.dtype)
    return RoutedTokens(hidden=model.hidden, size=size, ep=config.ep, etp=config.etp, share=micro.routed)


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps on a rank of a stage, vision towers aside.

    Attributes:
        layers: of all micro-batches in flight. again: of one layer while it is recomputed, on top of ``layers``.
        loss: kept after the last layer, and freed before a layer is recomputed.
    """

    layers: float
    again: float
    loss: float

    @property
    def most(self) -> float:
        return self.layers + max(self.again, self.loss)


def list_stage_options(model: ModelSpec, config: MegatronConfig, stage: int) -> tuple[LayerOptions, ...]:
    """List the options of each layer of a pipeline stage."""
    count = model.layers // config.pp
    return model.options[stage * count : (stage + 1) * count]


def count_kept(model: ModelSpec, config: MegatronConfig, stage: int, micro: MicroBatch, kernels: KernelMemory) -> Kept:
    """Count the bytes that autograd keeps. Stage i of p has p - i micro-batches in flight."""
    size, slots = get_itemsize(config.dtype), micro.slots / config.cp
    kept, again, loss = 2 * len(model.ropes) * model.rotary_dim * size * slots, 0.0, 0.0
    for options, count in Counter(list_stage_options(model, config, stage)).items():
        layer = _count_layer(model, options, config, micro, kernels)
        if config.recompute == "core":  # when a layer's core is recomputed, later tensors of the layer are freed
            kept += count * (layer.whole + layer.mixer.core_input - layer.mixer.core)
            again = max(again, layer.mixer.core - layer.mlp - layer.mixer.output - layer.late_norms)
        elif config.recompute == "full":  # the first norm keeps the same tensor as the layer
            kept += count * layer.input
            again = max(again, layer.whole - (layer.input if kernels.keeps_own_input(size) else 0))
        else:
            kept += count * layer.whole
    if stage == config.pp - 1:
        loss = model.hidden * (size + kernels.count_norm_input_bytes(size) / config.tp) * slots
        loss += model.hidden * size * slots * bool(config.lora.rank)  # derivatives of logprobs
    return Kept(kept * (config.pp - stage), again, loss)


def count_copied_slots(model: ModelSpec, config: MegatronConfig, kernels: KernelMemory) -> float:
    """Count the slots whose activations take as much as a copy of the keys and values of one token: attention gathers
    them for each sequence that has its beginning in another's slots. Layers that are computed again hold one's alone.
    """
    slot = count_kept(model, config, 0, MicroBatch(1), kernels).most
    heads = model.attention_heads
    copied = [mixer.count_cached(heads, config.tp) for mixer in model.mixers]
    numbers = sum(copied) if config.recompute == "none" else max(copied)  # of micro-batches of stage 0 in flight
    return numbers * get_itemsize(config.dtype) / slot


def estimate_activations(
    model: ModelSpec, config: MegatronConfig, stage: int, micro: MicroBatch, kernels: KernelMemory, trainable: bool
) -> int:
    """Estimate the peak bytes of a stage's rank beside its weights, gradients and optimizer state.

    The peak is the bytes that autograd keeps plus the larger of two temporary sets. The first is a recomputed layer
    with the most of three: the buffers of its attention's backward kernel, the rows of its experts, and the gradients
    in an MLP of a model with adapters, which holds little else. The second, on the last stage, is the logits of one
    chunk, forward, or backward with their gradient, and the output weight's gradient in fp32 and in the weight's type.
    The first stage adds the vision tower's activations, as if every token were an image's. Other gradients between two
    operators are left out, and so is a third tensor of logits where a model with adapters learns from a teacher.
    """
    size, tp, slots = get_itemsize(config.dtype), config.tp, micro.slots / config.cp
    head, is_last, dispatched = 0.0, stage == config.pp - 1, 0.0
    if model.experts and any(options.experts for options in list_stage_options(model, config, stage)):
        dispatched = model.experts.count_dispatched(describe_routed(model, config, micro)) * slots / tp
    if is_last and model.head == "language":
        every = slots * model.vocab / tp
        logits = min(every, kernels.head_logits)
        head = (3 if trainable else 2) * FP32 * logits  # forward: logits less the largest, exp of that, kept logits
        gradients = 2 * FP32 + (size if size < FP32 else 0)  # and one of both in the weight's type
        if config.lora.rank:  # beside a chunk's the gradient of hidden states, or forward the targets' weights
            head = gradients * min(every, kernels.frozen_logits) + model.hidden * size * slots * trainable
        elif trainable:  # backward: logarithms and gradient; the weight's gradient, twice
            head = max(head, gradients * logits + (FP32 + size) * model.vocab * model.hidden / tp)
    tower = 0.0
    if model.vision and stage == 0:
        adapted = any(adapter.weight.part == "vision" for adapter in config.lora.list_adapters(model))
        learns = trainable and "vision" not in config.freeze and (adapted or not config.lora.rank)
        recompute = config.recompute if learns else ""
        tower = model.vision.estimate_activations(slots, size=size, tp=tp, cp=config.cp, recompute=recompute)
        tower *= config.pp if trainable else 1
    if not trainable:
        options = set(list_stage_options(model, config, stage))
        largest = max(_count_layer(model, each, config, micro, kernels).whole for each in options)
        return int(max(largest + dispatched, head) + tower)
    kept = count_kept(model, config, stage, micro, kernels)
    sent = 0.0 if is_last else (config.pp - stage) * model.hidden * size * slots / tp  # on to the next stage
    heads = model.heads // tp, model.count_kv_heads(tp)
    kernel = kernels.count_backward_bytes(slots, micro.slots, micro.sequences, *heads, model.head_dim, size)
    gate = 0.0
    if config.lora.rank and not all(options.experts for options in list_stage_options(model, config, stage)):
        gate = (3 if kernels.fuses_swiglu and model.activation == "silu" else _GATE) * model.ffn * size * slots / tp
    return int(kept.layers + sent + tower + max(kept.again + max(kernel, dispatched, gate), kept.loss + head))
