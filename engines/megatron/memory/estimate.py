"""Bytes that a rank of a training engine holds, from the model's shape alone: nothing is built and nothing imported.

Parameters, gradients and optimizer state are exact: Megatron lays them out in one buffer, last parameter first, and
cuts it over the data- and context-parallel ranks. Parameters of experts have a buffer of their own, over the ranks that
hold the same experts. Activations are an estimate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engines.batch.balance import choose_largest
from engines.config import MegatronConfig
from engines.megatron.memory.activations import FP32, MicroBatch, estimate_activations, get_itemsize
from engines.models.spec import ModelSpec
from engines.models.weight import EMBEDDING, OUTPUT, Weight, is_adapter
from hardware.attention.rules import compute_slot_unit
from hardware.megatron.kernel_memory import KernelMemory

_ALIGNED, _BUCKET = 64, 128
"""Alignment, in numbers, of a parameter's start in Megatron's buffer, and of a bucket's end (core 0.16)."""
_OFFLOADED = 4 * FP32
"""Bytes of a number on the host: its master, two moments and, in a step, its gradient."""


@dataclass(frozen=True)
class Parameter:
    """A parameter on one rank.

    Attributes:
        learns: it has a gradient and optimizer state.
        shared: a copy of it is on another pipeline stage, so that it has a bucket of its own.
        is_expert: it is of experts, and in their buffer.
    """

    name: str
    shape: tuple[int, ...]
    learns: bool = True
    shared: bool = False
    is_expert: bool = False

    @property
    def numbers(self) -> int:
        """Count of its entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        parameters, gradients, optimizer: exact, the first with the buffers that a folder has. activations: of the
            micro-batches in flight, estimated.
        host: exact; in the host's memory, and no part of the total.
        is_visiting: the parameters are on the host but while the model computes, of which ``host`` has the bytes.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    is_visiting: bool = False

    @property
    def computing(self) -> int:
        """The bytes held for as long as the model computes."""
        return self.activations + (self.parameters if self.is_visiting else 0)

    @property
    def total(self) -> int:
        """Sum of all four, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def list_parameters(model: ModelSpec, config: MegatronConfig, stage: int) -> list[Parameter]:
    """List a pipeline stage's parameters on each of its tensor-parallel ranks, in Megatron's order."""
    copied = model.tied and config.pp > 1
    parameters = []
    for weight in list_weights(model, config, stage):
        if not weight.is_buffer:
            shared, is_expert = copied and weight.name == EMBEDDING, "ep" in weight.cut.values()
            shape = weight.cut_shape(config.cut_sizes)
            learns = is_adapter(weight.name) or not config.freezes(weight.part, weight.is_head)
            parameters.append(Parameter(weight.name, shape, learns, shared, is_expert))
    if copied and stage == config.pp - 1:  # it has the output layer, which is the first stage's embedding
        shape, learns = model.weights[EMBEDDING].cut_shape(config.cut_sizes), not config.freezes("language")
        parameters.append(Parameter(OUTPUT, shape, learns, shared=True))
    return parameters


def list_weights(model: ModelSpec, config: MegatronConfig, stage: int) -> Iterator[Weight]:
    """List a stage's weights in the order of Megatron's modules, each linear layer's adapter after its bias."""
    stated, weights, place = config.lora.list_adapters(model), [], ""
    adapters = {adapter.weight.name.removesuffix("weight"): adapter for adapter in stated}
    grouped = [each for each in stated if each.is_of_experts]
    for name, weight in [*model.weights.items(), ("", None)]:  # after the last weight there may be an adapter too
        if (adapter := adapters.get(place)) and not name.startswith(place):
            weights += [(adapter.a.name, adapter.a), (adapter.b.name, adapter.b)]
        weights += [(name, weight)] if weight else []
        if name.endswith(".experts.weight2"):  # after both
            own = [each for each in grouped if name[:-1] == each.weight.name[:-1]]
            weights += [(part.name, part) for each in own for part in (each.a, each.b)]
        place = name.rpartition(".")[0] + "."
    for name, weight in weights:
        if name.startswith("decoder.layers."):
            owner = int(name.split(".")[2]) // (model.layers // config.pp)
        else:
            owner = 0 if name.startswith(("embedding.", "vision.")) else config.pp - 1
        if owner == stage:
            yield weight


def compute_rank_memory(
    model: ModelSpec,
    config: MegatronConfig,
    stage: int,
    rank: int,
    micro: MicroBatch,
    kernels: KernelMemory,
    *,
    trainable: bool = True,
    cpu_offload: bool = False,
    shares_base: bool = False,
    parameters: list[Parameter] | None = None,
) -> RankMemory:
    """Compute the memory of a pipeline stage's rank.

    Args:
        rank: number among the stage's ranks.
        micro: sizes of a micro-batch. kernels: extra memory of the platform's kernels.
        trainable: with gradients and an optimizer. cpu_offload: frozen weights are offloaded to the host.
        shares_base: frozen weights are another engine's in the same process, and not counted here.
        parameters: the stage's, where they were listed before.
    """
    parameters, size = parameters or list_parameters(model, config, stage), get_itemsize(config.dtype)
    numbers = sum(parameter.numbers for parameter in parameters)
    shapes = [weight.cut_shape(config.cut_sizes) for weight in list_weights(model, config, stage) if weight.is_buffer]
    buffers = FP32 * sum(map(math.prod, shapes))
    activations = estimate_activations(model, config, stage, micro, kernels, trainable)
    if not trainable:
        host = numbers * size if cpu_offload else 0
        return RankMemory(numbers * size + buffers, 0, 0, activations, host, cpu_offload)
    learning = [parameter for parameter in parameters if parameter.learns]
    frozen = 0 if shares_base else numbers - sum(parameter.numbers for parameter in learning)
    buffer = state = offloaded = 0
    for is_expert, apart in ((False, config.tp), (True, config.cut_sizes["ep"] * config.cut_sizes["etp"])):
        own = [parameter for parameter in learning if parameter.is_expert == is_expert]
        if not own:
            continue
        # Ranks count on within those that hold parts of the same parameters, then over those that hold the same parts.
        places, buckets = _buffer(own, ranks := config.ranks // config.pp // apart)
        moments: list[int] = []
        for start, end in buckets:
            share = (end - start) // ranks
            part = start + rank // apart * share, start + (rank // apart + 1) * share
            moments += (max(0, min(stop, part[1]) - max(begin, part[0])) for begin, stop in places)
        # Megatron has an optimizer of each buffer.
        on_host = sum(moments[place] for place in choose_largest(moments, config.optimizer.offload_fraction))
        buffer, state, offloaded = buffer + buckets[-1][1], state + sum(moments) - on_host, offloaded + on_host
    state *= (2 if config.dtype == "float32" else 3) * FP32
    return RankMemory((buffer + frozen) * size + buffers, buffer * FP32, state, activations, offloaded * _OFFLOADED)


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


def estimate_padding(config: MegatronConfig, longest: int) -> float:
    """Estimate the share of slots that hold no token, from 0 to 1, of lengths spread evenly from 1 to ``longest``.

    thd pads each sequence to the unit that tp and cp cut, half a unit on average; bshd pads it to the longest of its
    micro-batch, taken as the longest there is: an upper bound, since those of like lengths go together.
    """
    unit, mean = compute_slot_unit(config.tp, config.cp, config.pad_to_multiple_of), (1 + longest) / 2
    slots = mean + (unit - 1) / 2 if config.layout == "thd" else _up(longest, unit)
    return 1 - mean / slots
