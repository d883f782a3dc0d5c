"""The memory that a run takes: for each process on its device, and for all processes on one machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import psutil

from engines.config import MegatronConfig
from engines.megatron.memory.activations import MicroBatch, get_itemsize
from engines.megatron.memory.estimate import RankMemory, compute_rank_memory, list_parameters
from engines.models.spec import ModelSpec
from hardware.attention.rules import compute_slot_unit
from hardware.platforms import get_platform
from rlworker.config.run import RunConfig
from rlworker.config.sizes import count_batch_bytes

if TYPE_CHECKING:
    from engines.config.served import ClassifierSpec
    from rlworker.config.sft import SftConfig

    Config = RunConfig | SftConfig

Served = Mapping[str, "ModelSpec | ClassifierSpec"]
"""Name of a served model -> its shape."""
GB = 2**30
_PROCESS = {"trainer": 0.5 * GB, "rollout": 1.7 * GB, "scorer": 0.2 * GB, "driver": 0.6 * GB, "ray": 0.6 * GB}
"""Bytes that a process takes before it holds a model, if all share one machine's memory (measured on a CPU)."""
_PIECES = 0.45
"""Bytes that the heap of a trainer's process keeps beside each byte of activations, since a freed tensor leaves a gap
which the next does not fit (glibc on a CPU: 0.48 with micro-batches of 2,048 slots of SmolLM2, 0.43 of 4,096)."""
_STORE = 0.2 * GB
"""Bytes of weights in Ray's object store during a weight sync, in addition to a batch."""
_THRESHOLD = "RAY_memory_usage_threshold"
"""Variable with the share of a machine's memory from which on Ray ends processes (0.95, Ray 2.60)."""


@dataclass(frozen=True)
class Need:
    """Memory of one process on its device, in bytes.

    Attributes:
        name: kind of process.
        count: number of processes of this kind; 0 for the sum over processes that share a device.
        roles: engine -> its memory; a rollout engine counts its weights as parameters and its KV cache as activations.
    """

    name: str
    count: int
    roles: dict[str, RankMemory]

    @property
    def total(self) -> int:
        """Total bytes on the device.

        The engines of a process compute one after the other, so that of activations and of offloaded weights, which are
        on the device only to compute, the largest counts and not the sum.
        """
        resident = sum(memory.total - memory.computing for memory in self.roles.values())
        return resident + max(memory.computing for memory in self.roles.values())

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return sum(memory.host for memory in self.roles.values())

    @property
    def is_rollout(self) -> bool:
        return "rollout" in self.roles


def list_needs(config: Config, models: dict[str, ModelSpec], served: Served = MappingProxyType({})) -> list[Need]:
    """List the memory of a run's processes: the largest rank of each pipeline stage, then a rollout engine, then one of
    each served model.

    Args:
        models: role -> model. served: name of a served model -> its shape.
    """
    needs = list(_plan_trainers(config, models))
    if isinstance(config, RunConfig):
        needs.append(_plan_rollout(config, models["actor"]))
        if config.placement.colocate:
            # At the canary, the one phase with both on a device that they share.
            actor = max(need.roles["actor"].parameters for need in needs if "actor" in need.roles)
            both = {"actor": RankMemory(actor, 0, 0, 0), "rollout": needs[-1].roles["rollout"]}
            needs.append(Need("at the canary", 0, both))
        needs += [_plan_served(config, name, spec) for name, spec in served.items()]
    return needs


def _plan_trainers(config: Config, models: dict[str, ModelSpec]) -> Iterator[Need]:
    dedicated = config.placement.dedicated_devices if isinstance(config, RunConfig) else ()
    shared = [role for role in models if role not in dedicated]
    for name, roles in (("actor", shared), *((role, [role]) for role in dict.fromkeys(dedicated))):
        for stage in range(config.actor.pp):
            held = {role: _find_largest_rank(models[role], config, stage, role) for role in roles}
            where = f"{name} ranks, stage {stage}" if config.actor.pp > 1 else f"{name} ranks"
            yield Need(where, config.actor.ranks // config.actor.pp, held)


def _plan_rollout(config: RunConfig, model: ModelSpec) -> Need:
    """Plan the devices of rollout engines: a part of the weights and a KV cache on each."""
    platform, rollout, tp = get_platform(config.platform), config.rollout, config.rollout.tp
    ep, etp = (tp, 1) if rollout.spreads_experts else (1, tp)  # vLLM cuts experts, if it does not share them out
    sizes = MegatronConfig(ranks=tp, tp=tp, ep=ep, etp=etp) if model.experts else MegatronConfig(ranks=tp, tp=tp)
    weights = sum(parameter.numbers for parameter in list_parameters(model, sizes, 0))
    copied = model.count_kv_heads(tp) - model.kv_heads / tp  # heads of keys and values, where devices have the same
    weights += int(2 * copied * model.layers * model.head_dim * model.hidden)
    cache, itemsize = (rollout.kv_cache_mb or platform.rollout_kv_cache_mb) * 2**20, get_itemsize(rollout.dtype)
    routes = 0
    if rollout.replay_routes and model.experts:
        # Beside the keys and values of a token in a layer, a byte for each expert that it chose there.
        routes = cache * model.experts.chosen // (2 * model.count_kv_heads(tp) * model.head_dim * itemsize)
    memory = RankMemory(weights * itemsize, 0, 0, cache + routes)
    return Need("rollout engines" if tp == 1 else "rollout devices", rollout.devices, {"rollout": memory})


def _plan_served(config: RunConfig, name: str, spec: ModelSpec | ClassifierSpec) -> Need:
    """Plan the devices of a served model's engines: a part of its weights and a KV cache on each."""
    own, rollout = config.models[name], config.rollout
    cache = (rollout.kv_cache_mb or get_platform(config.platform).rollout_kv_cache_mb) * 2**20
    weights = spec.count_weights() * get_itemsize(rollout.dtype) // own.tp
    return Need(f"{name} engines", own.devices, {"rollout": RankMemory(weights, 0, 0, cache)})


def _find_largest_rank(model: ModelSpec, config: Config, stage: int, role: str) -> RankMemory:
    """Find the rank with the most optimizer state among those that hold the same parameters."""
    actor, kernels = config.actor, get_platform(config.platform).kernel_memory
    trainable = role in ("actor", "critic")
    if not trainable:
        actor = actor.base_settings
        if isinstance(config, RunConfig) and config.views_reference:
            return RankMemory(0, 0, 0, 0)
    cpu_offload = isinstance(config, RunConfig) and not trainable and "reference" in config.placement.cpu_offload
    micro = plan_micro_batch(config)
    # Without experts, the tensor-parallel ranks that hold parts of the same parameters have equally much.
    ranks = range(0, actor.ranks // actor.pp if trainable else 1, 1 if model.experts else actor.tp)
    settings = {"trainable": trainable, "cpu_offload": cpu_offload, "parameters": list_parameters(model, actor, stage)}
    settings["shares_base"] = isinstance(config, RunConfig) and role == "critic" and config.shares_base
    memories = (compute_rank_memory(model, actor, stage, rank, micro, kernels, **settings) for rank in ranks)
    return max(memories, key=lambda memory: memory.total)


def plan_micro_batch(config: Config) -> MicroBatch:
    """Plan a full micro-batch of the longest samples, padding included: of one sequence at least, of a replica's
    mini-batch at most."""
    actor, row = config.actor, count_row_slots(config)
    most = max(row, min(actor.micro_batch_tokens, count_share(config) * row))
    slots = most // row * row if actor.layout == "bshd" else actor.slots or most
    return MicroBatch(slots, max(1, slots // row))


def count_row_slots(config: Config) -> int:
    """Count the slots of the longest sample, padding included."""
    actor = config.actor
    unit = compute_slot_unit(actor.tp, actor.cp, actor.pad_to_multiple_of)
    return (actor.layout == "bshd" and actor.slots) or -(-config.longest // unit) * unit


def count_share(config: Config) -> int:
    """Count the samples of a mini-batch that each replica gets."""
    return -(-config.rows_per_mini_batch // config.actor.dp)


def judge_machine(
    config: Config, models: dict[str, ModelSpec], served: Served = MappingProxyType({})
) -> tuple[str, bool]:
    """Estimate the memory of all processes of a run on this machine, with the longest samples.

    Args:
        models, served: as of ``list_needs``.

    Returns:
        the estimate as text, and whether it fits.
    """
    total = _read_machine_bytes()
    limit = float(os.environ.get(_THRESHOLD) or 0.95) * total
    parts = _list_machine_parts(config, models, served)
    text = f"All processes on this machine take up to {_add_up(parts) / GB:.1f} GB of {total / GB:.1f} GB: "
    text += ", ".join(f"{name} {f'{count} x ' if count > 1 else ''}{each / GB:.1f}" for name, count, each in parts)
    if _add_up(parts) <= limit:
        return text, True
    text += f". Does not fit: Ray ends processes from {limit / GB:.1f} GB on; "
    tokens = config.actor.micro_batch_tokens // 2
    while tokens >= config.longest:
        smaller = replace(config, actor=replace(config.actor, micro_batch_tokens=tokens))
        held = _add_up(_list_machine_parts(smaller, models, served))
        if held <= limit:
            return f"{text}with --actor.micro-batch-tokens {tokens} it is {held / GB:.1f} GB", False
        tokens //= 2
    return f"{text}take fewer ranks, --actor.recompute full, a smaller model or more machines", False


def _list_machine_parts(config: Config, models: dict[str, ModelSpec], served: Served) -> list[tuple[str, int, float]]:
    """List the processes that share a machine's memory: name, number, and bytes of each."""
    parts = []
    for need in list_needs(config, models, served):
        pieces = 0 if need.is_rollout else _PIECES * max(memory.activations for memory in need.roles.values())
        each = need.total + need.host + pieces + _PROCESS["rollout" if need.is_rollout else "trainer"]
        if need.count:
            parts.append((need.name, need.count, each))
    if isinstance(config, RunConfig):
        parts.append(("environment workers", config.environment.workers, _PROCESS["scorer"]))
    return [*parts, ("driver and Ray", 1, _PROCESS["driver"] + _PROCESS["ray"] + _STORE + count_batch_bytes(config))]


def _add_up(parts: list[tuple[str, int, float]]) -> float:
    return sum(count * each for _, count, each in parts)


def _read_machine_bytes() -> int:
    """Read the memory of this machine, or of the container that this process is in."""
    total, limit = psutil.virtual_memory().total, Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total
