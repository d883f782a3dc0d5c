"""Bytes that a rank of a training engine holds, from the model's shape alone: nothing is built and nothing imported.

Parameters, gradients and optimizer state are exact: Megatron lays them out in one buffer, last parameter first, and
cuts it over the data- and context-parallel ranks. Activations are an estimate.
"""

import math
from dataclasses import dataclass

from engines.config import MegatronConfig
from engines.models.family import EMBEDDING, OUTPUT, Part
from engines.models.spec import ModelSpec
from hardware.attention.rules import slot_unit

_ALIGNED, _BUCKET = 64, 128
"""Numbers to a multiple of which Megatron starts a parameter in its buffer, and ends a bucket (core 0.16)."""
_FP32 = 4
_HEAD_LOGITS = 2**25
"""Logits that the head has at once (engines/megatron/logprobs.py)."""


@dataclass(frozen=True)
class Parameter:
    """A parameter on one rank.

    Attributes:
        shared: a copy of it is on another pipeline stage, so that it has a bucket of its own.
    """

    name: str
    shape: tuple[int, ...]
    part: Part = "language"
    shared: bool = False

    @property
    def numbers(self) -> int:
        """Count of its entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        parameters, gradients, optimizer: exact. activations: of the micro-batches in flight, estimated.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all four, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def get_itemsize(dtype: str) -> int:
    """Get the bytes of a number of this type."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def list_parameters(model: ModelSpec, config: MegatronConfig, stage: int) -> list[Parameter]:
    """List a pipeline stage's parameters on each of its tensor-parallel ranks, in Megatron's order."""
    copied = model.tied and config.pp > 1
    parameters = []
    for name, weight in model.weights.items():
        if _find_stage(name, model, config) == stage:
            shared = copied and name == EMBEDDING
            parameters.append(Parameter(name, weight.cut_shape(config.tp), weight.part, shared))
    if copied and stage == config.pp - 1:  # it has the output layer, which is the first stage's embedding
        parameters.append(Parameter(OUTPUT, model.weights[EMBEDDING].cut_shape(config.tp), shared=True))
    return parameters


def _find_stage(name: str, model: ModelSpec, config: MegatronConfig) -> int:
    """Find the pipeline stage that has a parameter of the model."""
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2]) // (model.layers // config.pp)
    return 0 if name.startswith(("embedding.", "vision.")) else config.pp - 1


def compute_rank_memory(
    model: ModelSpec, config: MegatronConfig, stage: int, rank: int, tokens: int = 0, trainable: bool = True
) -> RankMemory:
    """Compute the memory of a pipeline stage's rank.

    Args:
        tokens: slots of a micro-batch, over all context-parallel ranks.
        rank: among the data- and context-parallel ranks that hold the same parameters.
        trainable: with gradients and an optimizer.
    """
    parameters, size = list_parameters(model, config, stage), get_itemsize(config.dtype)
    numbers, moments = sum(parameter.numbers for parameter in parameters), 0
    if not trainable:
        return RankMemory(numbers * size, 0, 0, estimate_activations(model, config, stage, tokens, trainable=False))
    learning = [parameter for parameter in parameters if parameter.part not in config.freeze]
    frozen = numbers - sum(parameter.numbers for parameter in learning)
    places, buckets = _buffer(learning, config.dp * config.cp)
    for start, end in buckets:
        share = (end - start) // (config.dp * config.cp)
        part = start + rank * share, start + (rank + 1) * share
        moments += sum(max(0, min(stop, part[1]) - max(begin, part[0])) for begin, stop in places)
    masters = _FP32 * moments if config.dtype != "float32" else 0
    buffer = buckets[-1][1]
    activations = estimate_activations(model, config, stage, tokens)
    return RankMemory((buffer + frozen) * size, buffer * _FP32, 2 * _FP32 * moments + masters, activations)


def _buffer(parameters: list[Parameter], ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Lay out Megatron's buffer: start and end of each parameter, last one first, and of each bucket, in numbers."""
    places, buckets, start, end = [], [], 0, 0

    def close() -> int:
        buckets.append((start, _up(end, math.lcm(ranks, _BUCKET))))
        return buckets[-1][1]

    for parameter in reversed(parameters):
        begin = _up(end, _ALIGNED)
        if parameter.shared and end > start:
            begin = start = end = close()
        end = begin + parameter.numbers
        places.append((begin, end))
        if parameter.shared:
            start = end = close()
    if end > start:
        close()
    return places, buckets


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def estimate_activations(
    model: ModelSpec, config: MegatronConfig, stage: int, tokens: float, trainable: bool = True
) -> int:
    """Estimate the bytes that the forward passes of a stage keep for their backward passes.

    Per token and layer, cut over tp by sequence parallelism: inputs and outputs of both norms and the residual (5 h),
    queries, keys and values before and after rotation, attention's output, and the MLP's four tensors (4 ffn). With
    full recomputation a layer keeps its input alone, and one layer at a time has all of it. Stage i of p has p - i
    micro-batches in flight. The last stage also has the logits of some tokens and their gradient, and the output
    weight's gradient in fp32 and as it is handed on; the first what a vision tower keeps where every token is an
    image's.
    """
    tokens, size, tp = tokens / config.cp, get_itemsize(config.dtype), config.tp
    heads = (2 * (model.heads + 2 * model.kv_heads) + model.heads) * model.head_dim
    layer = (5 * model.hidden + heads + 4 * model.ffn) * size / tp
    layers = model.layers // config.pp
    if not trainable:
        bytes_per_token = layer
    elif config.recompute == "full":
        bytes_per_token = layers * model.hidden * size / tp * (config.pp - stage) + layer
    else:
        bytes_per_token = layers * layer * (config.pp - stage)
    head = 0.0
    if model.vision and stage == 0:
        head = _estimate_tower(model, config, tokens, trainable) * (config.pp if trainable else 1)
    if stage == config.pp - 1 and model.head == "language":
        head += _FP32 * 2 * min(tokens * model.vocab / tp, _HEAD_LOGITS)
        if trainable:
            head += (_FP32 + size) * model.vocab * model.hidden / tp
    return int(tokens * bytes_per_token + head)


def _estimate_tower(model: ModelSpec, config: MegatronConfig, tokens: float, trainable: bool) -> float:
    """Estimate the bytes that a vision tower keeps of so many image tokens of each context-parallel rank.

    Per patch and layer: inputs and outputs of both norms and the residual, queries, keys and values before and after
    rotation, attention's output (11 widths in all), the tensors of the MLP, and RMS norms' inputs in fp32. Features are
    held for all of a replica's tokens by each rank: as they are made, gathered, and as they are merged.
    """
    vision, size = model.require_vision(), get_itemsize(config.dtype)
    gated = vision.tower.gated
    layer = 11 * vision.width * size + (4 if gated else 2) * vision.ffn * size + 2 * _FP32 * vision.width * gated
    if not trainable or "vision" in config.freeze:
        bytes_per_patch = layer
    elif config.recompute == "full":
        bytes_per_patch = vision.depth * vision.width * size + layer
    else:
        bytes_per_patch = vision.depth * layer
    features = 3 * tokens * config.cp * vision.levels * vision.out * size
    return tokens * vision.merge**2 / config.tp * bytes_per_patch + features


def estimate_padding(config: MegatronConfig, longest: int) -> float:
    """Estimate the share of slots that hold no token, from 0 to 1, of lengths spread evenly from 1 to ``longest``.

    thd pads each sequence to the unit that tp and cp cut, half a unit on average; bshd pads it to the longest of its
    micro-batch, taken as the longest there is: an upper bound, since those of like lengths go together.
    """
    unit, mean = slot_unit(config.tp, config.cp, config.pad_to_multiple_of), (1 + longest) / 2
    slots = mean + (unit - 1) / 2 if config.layout == "thd" else _up(longest, unit)
    return 1 - mean / slots
