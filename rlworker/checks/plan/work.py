"""The work of a phase on one device: FLOPs, bytes moved and sent, from the model's shape and a schedule of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from engines.batch.beginnings import choose_sharing, group_prompts
from engines.batch.schedule import plan_schedule
from engines.config import LoraConfig, MegatronConfig
from engines.megatron.memory.activations import FP32, MicroBatch, count_copied_slots, count_kept, get_itemsize
from engines.megatron.memory.estimate import list_parameters
from engines.models.adapters import ExpertAdapter
from engines.models.spec import ModelSpec
from hardware.platform import Platform

_FORWARD, _BACKWARD = 2, 4
"""How often a forward and a backward pass move each byte that is kept between them."""
_LOGIT_PASSES = 10, 20, 4
"""How often forward and backward passes read or write a logit in fp32, and the derivatives of a frozen head."""
_OPTIMIZER, _GRADIENT = 32, 16
"""Bytes that move for a weight in an optimizer step: of masters and moments where they are held, of gradients."""


@dataclass(frozen=True)
class Work:
    """The work of one device.

    Attributes:
        products, attention: FLOPs. moved: bytes between the device and its memory.
        layers: passes through a layer, a backward pass for two.
        sent: way of parallelism -> bytes that the device sends, and number of calls.
    """

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    layers: float = 0.0
    sent: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        sent = dict(self.sent)
        for way, (size, calls) in other.sent.items():
            before = sent.get(way, (0.0, 0.0))
            sent[way] = before[0] + size, before[1] + calls
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.moved + other.moved,
            self.layers + other.layers,
            sent,
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of one pass of a replica over its part of a mini-batch: the mean of all replicas.

    Attributes:
        micro_batches: their number. slots: tokens and padding. pairs: of a query and a key that it sees.
        scored: tokens whose logits are made. each: tokens of all sequences, shared ones with each.
    """

    micro_batches: int
    slots: float
    pairs: float
    scored: float
    each: float


def schedule_tokens(
    model: ModelSpec,
    actor: MegatronConfig,
    platform: Platform,
    prompt: int,
    sampled: int,
    count: int,
    samples: int,
) -> Tokens:
    """Schedule the equal samples of a mini-batch as a step does, and count the tokens that a replica computes.

    Args:
        prompt, sampled: tokens of each. count: number of the samples. samples: those of each prompt.
    """
    inputs = prompt + sampled - 1
    lengths, beginnings = [inputs] * count, None
    if choose_sharing(actor, platform) != "none" and actor.layout == "thd":
        copied = count_copied_slots(model, actor, platform.kernel_memory)
        beginnings = replace(group_prompts(np.arange(count) // samples, np.full(count, prompt)), copied_slots=copied)
    most = platform.max_pack_sequences
    schedule = plan_schedule(lengths, actor, model.hidden, actor.dp, most, beginnings=beginnings)
    computed = schedule.count_computed()
    shared = count * inputs - computed  # tokens of prompts that are not computed again
    pairs = count * inputs**2 / 2 - shared / max(1, prompt) * prompt**2 / 2
    unit = actor.tp * actor.cp
    padding = 1 + (unit - 1) / 2 / inputs
    return Tokens(
        max(len(rows) for rows in schedule.rows),
        computed * padding / actor.dp,
        pairs / actor.dp,
        count * sampled / actor.dp,
        count * inputs / actor.dp,
    )


def count_passes(
    model: ModelSpec, actor: MegatronConfig, platform: Platform, stage: int, tokens: Tokens, learns: bool
) -> Work:
    """Count the forward passes over a mini-batch on a rank of a stage, with backward passes where it learns.

    A backward pass multiplies twice by each weight, and once by a frozen one. Products of adapters are left out.
    """
    kernels, size, cut = platform.kernel_memory, get_itemsize(actor.dtype), actor.tp * actor.cp
    layers, head = model.count_used_weights()
    again = learns and actor.recompute == "full"
    passes, frozen = 1 + again + 2 * learns, learns and bool(actor.lora.rank)
    flops = 2.0 * (passes - frozen) * layers / actor.pp * tokens.slots / cut
    flops += passes * model.token_flops / actor.pp * tokens.slots / cut
    again_core = learns and actor.recompute != "none"
    pairs = (1 + again_core + 2.5 * learns) * model.pair_flops / actor.pp * tokens.pairs / cut
    unit = MicroBatch(1000, 1)
    whole = replace(actor, recompute="none", lora=LoraConfig())  # with adapters less is kept, and made again
    kept = count_kept(model, whole, stage, unit, kernels).layers
    kept *= tokens.slots / unit.slots / (actor.pp - stage)
    moved = kept * (_FORWARD * (1 + again) + _BACKWARD * learns)
    inputs, outputs = _count_adapted(model, actor)
    # Forward an input is read, and an output read and written. Backward the output's gradient is read twice, the input
    # read and its gradient written; adding that to another's reads both and writes one.
    adapted = (1 + again) * (inputs + 2 * outputs) + learns * (5 * inputs + 2 * outputs)
    moved += adapted * size * tokens.slots / cut / actor.pp
    for parameter in list_parameters(model, actor, stage):
        reads, sums = (passes - frozen) * size, learns * parameter.learns * (2 * size + 2 * FP32)
        moved += tokens.micro_batches * parameter.numbers * (reads + sums)
    work = Work(flops, pairs, moved, passes * model.layers / actor.pp * tokens.micro_batches)
    if stage == actor.pp - 1 and model.head == "language":
        work += _count_head(head, model, actor, tokens, learns, kernels.head_logits)
    return work + Work(sent=_count_sent(model, actor, stage, tokens, passes, frozen))


def _count_adapted(model: ModelSpec, actor: MegatronConfig) -> tuple[float, float]:
    """Count the inputs and outputs that a slot has in all layers with adapters of the language model."""
    inputs = outputs = 0.0
    chosen = model.experts.chosen if model.experts else 0
    for adapter in actor.lora.list_adapters(model):
        if isinstance(adapter, ExpertAdapter):
            inputs, outputs = inputs + chosen * adapter.shape[2], outputs + chosen * adapter.shape[1]
        elif adapter.weight.part == "language":
            shapes = list(adapter.weight.tensors.values())
            inputs, outputs = inputs + shapes[0][1], outputs + sum(shape[0] for shape in shapes)
    return inputs, outputs


def _count_head(
    weights: float, model: ModelSpec, actor: MegatronConfig, tokens: Tokens, learns: bool, at_once: int
) -> Work:
    """Count the output layer: logits of scored tokens, made again where a micro-batch has more than one chunk. A frozen
    one multiplies by its weights twice, both times forward."""
    scored = tokens.scored / actor.cp
    logits = scored * model.vocab / actor.tp
    if learns and actor.lora.rank:
        moved = FP32 * logits * (_LOGIT_PASSES[0] + _LOGIT_PASSES[2])
        return Work(4.0 * weights / actor.tp * scored, 0.0, moved)
    chunks = max(tokens.micro_batches, logits / at_once)
    again = learns and logits / tokens.micro_batches > at_once
    flops = 2.0 * (1 + again + 2 * learns) * weights / actor.tp * scored
    moved = FP32 * logits * (_LOGIT_PASSES[0] + learns * _LOGIT_PASSES[1] + again * 2)
    sums = learns * chunks * weights / actor.tp * (2 * get_itemsize(actor.dtype) + 2 * FP32)
    return Work(flops, 0.0, moved + sums)


def _count_sent(
    model: ModelSpec, actor: MegatronConfig, stage: int, tokens: Tokens, passes: int, frozen: bool
) -> dict[str, tuple[float, float]]:
    """Count bytes and calls of the collectives within a replica."""
    size, layers, micros = get_itemsize(actor.dtype), model.layers / actor.pp, tokens.micro_batches
    hidden, sent = tokens.slots / actor.cp * model.hidden * size, {}
    learns = passes > 1
    if actor.tp > 1:
        # Around attention and MLP: a gather and a scattered sum each way, and a gather for weights that are not frozen.
        calls = 4 * passes - (4 if frozen else 2 * learns)
        sent["tp"] = layers * calls * hidden * (actor.tp - 1) / actor.tp, layers * calls * micros
    if actor.pp > 1:
        ways = (stage > 0) * learns + (stage < actor.pp - 1)
        sent["pp"] = ways * hidden / actor.tp, 2.0 * ways * micros
    if actor.cp > 1:  # keys and values are gathered, and their gradients scattered
        each = 2 * model.count_kv_heads(actor.tp) * model.head_dim * size * tokens.slots
        sent["cp"] = passes * layers * each * (actor.cp - 1) / actor.cp, passes * layers * micros
    if model.experts and actor.ep * actor.etp > 1:
        ranks = actor.ep * actor.etp
        rows = model.experts.chosen * actor.etp * hidden / actor.tp * (ranks - 1) / ranks
        sent["ep"] = 2.0 * passes * layers * rows, 4.0 * passes * layers * micros
    return sent


def count_optimizer(model: ModelSpec, actor: MegatronConfig, stage: int) -> Work:
    """Count an optimizer step: gradients summed over replicas, masters and moments, weights gathered."""
    parameters = [each for each in list_parameters(model, actor, stage) if each.learns]
    numbers, size = sum(each.numbers for each in parameters), get_itemsize(actor.dtype)
    owners = actor.dp * actor.cp
    moved = numbers * (_GRADIENT + _OPTIMIZER / owners)
    sent = {}
    if owners > 1:
        sent["dp"] = numbers * (FP32 + size) * (owners - 1) / owners, 4.0
    return Work(moved=moved, sent=sent)


def count_forward(model: ModelSpec, tp: int, size: int, sequences: float, tokens: float, context: float) -> Work:
    """Count a forward pass of a rollout engine's device.

    Args:
        size: bytes of a number. sequences: of which logits are made. tokens: that are computed.
        context: tokens that are attended to, over all computed tokens.
    """
    layers, head = model.count_used_weights()
    cached = model.count_cached(tp) * size
    flops = 2.0 * (layers * tokens + head * sequences) / tp
    attention = model.pair_flops * context / tp
    reached = _count_reached(model, tokens) * size / tp
    sent = {"tp": (2.0 * model.layers * tokens * model.hidden * size, 2.0 * model.layers)} if tp > 1 else {}
    return Work(flops, attention, reached + cached * context * min(1.0, sequences / max(1.0, tokens)), 0.0, sent)


def _count_reached(model: ModelSpec, tokens: float) -> float:
    """Count the weights that a pass reads: of experts those that some token has chosen."""
    every = model.count_weights() - (0 if model.tied else model.vocab * model.hidden)
    if not model.experts:
        return every
    layers, head = model.count_used_weights()
    share = model.experts.chosen / model.experts.count
    experts = (every - layers - head) / (1 - share) if share < 1 else 0.0
    return every - experts * (1 - share) ** max(1.0, tokens)
