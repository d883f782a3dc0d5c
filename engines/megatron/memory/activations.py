"""Memory of activations: tensors that forward passes keep for backward passes, and temporary tensors of the latter."""

from collections import Counter
from dataclasses import dataclass

from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from hardware.megatron.form import Experts, LayerOptions
from hardware.megatron.kernel_memory import KernelMemory
from hardware.megatron.mixers import MixedTokens, MixerBytes

FP32 = 4
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
        mlp = _count_mixture(options.experts, model.hidden, halves, config, micro.routed) * slots
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


def _count_mixture(experts: Experts, hidden: int, halves: int, config: MegatronConfig, routed: float) -> float:
    """Count the bytes that a layer of experts keeps for each slot, ``halves`` tensors of its shared expert's width."""
    size, shared = get_itemsize(config.dtype), experts.shared
    kept = count_experts(experts, hidden, size, config, routed)
    if config.megatron.get("moe_z_loss_coeff"):  # logits, and the logarithm of their sum
        kept += (experts.count + 1) * FP32
    # With the input, of which the router has a copy, and the gate and the output that it scales.
    gate = hidden + 1 if experts.gates_shared else 0
    return kept + ((halves * shared + hidden + gate) * size if shared else 0)


_INDEX = 8
"""Bytes of a number of a token or an expert."""


def count_experts(experts: Experts, hidden: int, size: int, config: MegatronConfig, routed: float = 1.0) -> float:
    """Count the bytes that a mixture keeps for the backward pass, for each slot as if it held a token.

    For each token: its hidden state in fp32 and its place; scores, and the chosen ones before and after they are
    scaled. For each of its experts: a row of the input; gate, up, activation, their product and that times the row's
    weight; the weight, its expert and two places. Of an expert in several parts each rank has a row. ``routed`` is as
    in ``MicroBatch``.
    """
    row = (config.etp * hidden + 5 * experts.ffn) * size + FP32 + 3 * _INDEX
    token = hidden * FP32 + (experts.count + 2 * experts.chosen) * FP32 + _INDEX
    return experts.chosen * routed * row + token


def count_dispatched(experts: Experts, hidden: int, config: MegatronConfig, routed: float = 1.0) -> float:
    """Count the bytes for each slot of the rows that are on their way from experts, beside what a mixture keeps.

    A row is the hidden state of a token and one of its experts. Without an exchange there are the experts' outputs, and
    the same in order of tokens. With one there are the rows that were sent, those that arrived, the experts' outputs,
    the same in order of ranks, and those that came back; of an expert in several parts all but the first once for each.
    Beside them each token has a hidden state in fp32, or two in 16 bits: its copy before and its sum after.
    """
    rows = 1 + (1 + 3 * routed) * config.etp if config.ep * config.etp > 1 else 2
    return (rows * experts.chosen * get_itemsize(config.dtype) + FP32) * hidden


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
        dispatched = count_dispatched(model.experts, model.hidden, config, micro.routed) * slots / tp
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
        tower = _estimate_tower(model, config, slots, trainable) * (config.pp if trainable else 1)
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


_MLP_TENSORS = {"silu": 4, "gelu": 2, "gelu_pytorch_tanh": 2, "quick_gelu": 3}
"""Activation of a tower -> tensors that its MLP keeps: its input and output, the sigmoid of quick-gelu, a separate
operator in torch, and for a gated MLP the gated half and the product."""


def _estimate_tower(model: ModelSpec, config: MegatronConfig, tokens: float, trainable: bool) -> float:
    """Estimate the bytes that a vision tower keeps for a number of image tokens of each context-parallel rank.

    Per patch and layer: inputs and outputs of both norms and the residual, queries, keys and values before and after
    rotation, attention's output (11 widths in all), the tensors of the MLP, and RMS norms' inputs in fp32. Features are
    held for all of a replica's tokens by each rank: as they are made, gathered, and as they are merged.
    """
    vision, size = model.require_vision(), get_itemsize(config.dtype)
    mlp, norms = _MLP_TENSORS[vision.tower.activation] * vision.ffn, 2 * vision.width * vision.tower.gated
    whole = (11 * vision.width + mlp) * size + norms * FP32
    adapted = any(adapter.weight.part == "vision" for adapter in config.lora.list_adapters(model))
    if not trainable or "vision" in config.freeze or (config.lora.rank and not adapted):
        kept = whole
    elif config.recompute == "full":
        kept = vision.depth * vision.width * size + whole
    else:
        kept = vision.depth * whole
    features = 3 * tokens * config.cp * vision.levels * vision.out * size
    return tokens * vision.merge**2 / config.tp * kept + features
