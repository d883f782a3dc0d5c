"""The workers, processes of Ray: one per trainer rank, one per rollout engine.

Each worker sets its platform's environment variables before it imports torch, and imports its engine afterwards. So
this module imports neither.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import ray

from engines.config import MegatronConfig, VllmConfig
from engines.models.folders.hf_folder import save_hf_folder
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from rlworker.base.digests import FileDigest, digest_files
from rlworker.cluster.placement import DeviceSlot, find_interfaces
from rlworker.cluster.ray import pausing_collection
from rlworker.cluster.weights.receiver import Receiver, WeightReceiver
from rlworker.cluster.weights.sender import WeightSender

if TYPE_CHECKING:
    from engines.batch.shard import Outputs, Shard
    from engines.interfaces import LossFn, OffloadPart, RolloutEngine, StepResult, Tag, TrainEngine
    from engines.weight_digest import DigestPlan
    from hardware.platform import Platform
    from rlworker.cluster.traces import Tracer

_ADAPTERS = "engines.megatron.extensions.adapters"
"""Module that only an actor with adapters needs."""


@dataclass(frozen=True)
class Role:
    """One training engine of a run.

    Attributes:
        name: "actor", "reference", "critic", or "teacher" and a source of rows. model, config: the model, and the
            engine's settings.
        temperature: the logits are divided by it.
        trainable: whether the engine has gradients and an optimizer.
        cpu_offload: whether its weights are on the device only while it computes.
        is_view: whether it is the actor's engine with its adapters off, and takes no memory.
        needs_topk_logprobs: whether its loss reads the sampler's likeliest ids; other engines are not sent them.
        shares_base: whether its weights beside its adapters and head are the actor's.
    """

    name: str
    model: ModelSpec
    config: MegatronConfig
    temperature: float = 1.0
    trainable: bool = True
    cpu_offload: bool = False
    is_view: bool = False
    needs_topk_logprobs: bool = False
    shares_base: bool = False


class _Worker:
    """A process that traces its work when it is asked to."""

    platform: Platform
    _tracer: Tracer | None = None

    def begin_trace(self, phase: str) -> None:
        from rlworker.cluster.traces import Tracer

        self._tracer = Tracer(self.platform.build_profiler)
        self._tracer.begin(phase)

    def end_trace(self, path: str) -> None:
        if self._tracer:
            self._tracer.end(path)
        self._tracer = None

    def measure_peak_memory(self) -> int:
        return self.platform.measure_peak_memory()

    def _note_work(self) -> None:
        if self._tracer:
            self._tracer.worked = True


class TrainWorker(_Worker):
    """One rank of the training engines in its process. Methods with a ``role`` act on the engine of that name.

    Args:
        platform: name of the platform. name: name of this group of ranks in messages. rank: number of this rank.
    """

    def __init__(self, platform: str, name: str, rank: int):
        self.platform, self.name, self.rank = get_platform(platform), name, rank
        self.engines: dict[str, TrainEngine] = {}
        self.is_prepared = False
        self.sender = WeightSender(self.platform)
        os.environ.update(self.platform.get_train_env() | {"HF_HUB_OFFLINE": "1"} | find_interfaces(self.platform))

    def __repr__(self) -> str:  # Ray's messages say it
        return f"{self.name} rank {self.rank}"

    def find_device_slot(self) -> DeviceSlot:
        """Return the node and the devices that Ray gave this rank; devices are empty on a CPU."""
        names = os.environ.get(self.platform.visible_devices or "", "").split(",")
        return DeviceSlot(ray.get_runtime_context().get_node_id(), tuple(filter(None, names)))

    def prepare(self, after: None) -> None:
        """Import the engine's packages, once. Ray waits for ``after``, the ``prepare`` of another rank, first."""
        if self.is_prepared:
            return
        with pausing_collection():
            self.device = self.platform.init_process(self.rank)
            _import_megatron()
        self.is_prepared = True

    def find_address(self) -> str:
        """Listen for the other ranks, and return ``host:port``. The port stays open in this process from here on."""
        _, groups = _import_megatron()
        host = ray.util.get_node_ip_address()
        self.store = groups.open_store(host, 0, listen=True)
        return f"{host}:{self.store.port}"

    def start(self, address: str, roles: tuple[Role, ...], seed: int) -> dict:
        """Join the other ranks and build the models; returns this rank's ``dp_rank`` and ``is_leader``."""
        engines, groups = _import_megatron()
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        with pausing_collection():
            store = self.__dict__.pop("store", None)
            groups.init_distributed(self.platform, roles[0].config, self.rank, address, seed, store)
            for role in roles:
                where = role.model.move_here(), role.config, self.platform, self.device
                uses: dict[str, Any] = dict(temperature=role.temperature, trainable=role.trainable)
                uses |= {"cpu_offload": role.cpu_offload, "base": self.engines["actor"] if role.shares_base else None}
                if role.is_view:
                    engine: Any = _call_named(self.engines["actor"], f"{_ADAPTERS}:BaseView")
                else:
                    engine = engines.MegatronEngine(*where, **uses)
                self.engines[role.name] = engine
        return {"dp_rank": engine.dp_rank, "is_leader": engine.is_leader}

    def close(self) -> None:
        """Drop the engines and leave the other ranks. ``start`` may follow, with other models and sizes.

        Raises:
            RuntimeError: a fault was planted into this process, so that it must not be used again.
        """
        _, groups = _import_megatron()
        _refuse_planted("rank")
        self.sender.close()
        self.sender = WeightSender(self.platform)
        self.engines.clear()
        gc.unfreeze()  # an engine is a cycle, and was left out of collections when it had been built
        gc.collect()
        groups.leave_distributed()

    def _use(self, role: str) -> TrainEngine:
        self._note_work()
        return self.engines[role]

    def forward(self, role: str, shard: Shard, raw: bool = False) -> Outputs | None:
        return self._use(role).forward(shard, raw)

    def run(self, role: str, function: str, *args) -> Any:
        """Call ``function(engine, *args)``; ``function`` is ``module:function``, which the controller cannot import."""
        return _call_named(self._use(role), function, *args)

    def train_step(self, role: str, shard: Shard, loss_fn: LossFn, denominator: float) -> StepResult:
        return self._use(role).train_step(shard, loss_fn, denominator)

    def offload(self, role: str, parts: tuple[OffloadPart, ...]) -> None:
        self.engines[role].offload(parts)

    def onload(self, role: str, parts: tuple[OffloadPart, ...]) -> None:
        self.engines[role].onload(parts)

    def sync_weights(
        self, role: str, receivers: Sequence[Receiver], version: int, max_bytes: int, plan: DigestPlan | None = None
    ) -> dict[str, int] | None:
        """Send the weights to rollout workers, as ``WeightSender.sync``. Every rank must call it."""
        return self.sender.sync(self._use(role), receivers, version, max_bytes, plan)

    def save(self, role: str, folder: str) -> dict[str, FileDigest]:
        """Write this rank's part of a checkpoint into ``folder``; returns file name -> digest."""
        return digest_files(folder, self._use(role).save(folder))

    def load(self, role: str, folder: str) -> None:
        self._use(role).load(folder)

    def save_hf(self, role: str, folder: str, shard_bytes: int) -> dict[str, FileDigest]:
        """Write the weights as a HuggingFace folder, with the config and tokenizer of the starting model.

        Returns:
            file name -> digest, on the rank that wrote the files; empty on the others.
        """
        engine = self._use(role)
        return digest_files(folder, save_hf_folder(engine.export_weights(), engine.model, folder, shard_bytes))

    def save_adapters(self, role: str, folder: str) -> dict[str, FileDigest]:
        """Write the adapters as PEFT does; returns file name -> digest on the rank that wrote the files."""
        names = _call_named(self._use(role), f"{_ADAPTERS}:save_adapters", folder)
        return digest_files(folder, names)

    def digest_files(self, folder: str, names: list[str]) -> dict[str, FileDigest]:
        return digest_files(folder, names)


class RolloutWorker(WeightReceiver, _Worker):
    """One vLLM engine.

    Args:
        platform: name of the platform. index: number of the engine. devices: number of its devices.
        device_slot: devices on which it takes turns with trainers; None if it has devices of its own.
    """

    def __init__(self, platform: str, index: int, devices: int = 1, device_slot: DeviceSlot | None = None):
        self.index, self.platform, self.takes_turns = index, get_platform(platform), device_slot is not None
        self.devices = devices
        os.environ.update(self.platform.get_rollout_env() | {"HF_HUB_OFFLINE": "1"})
        if device_slot and self.platform.visible_devices:
            os.environ[self.platform.visible_devices] = ",".join(device_slot.devices)
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        if devices > 1 and threads.isdecimal():
            # Ray gives a process as many as it has CPUs; those of the devices share them.
            os.environ["OMP_NUM_THREADS"] = str(max(1, int(threads) // devices))

    def __repr__(self) -> str:
        return f"rollout engine {self.index}"

    def prepare(self) -> None:
        """Import the engine's packages, which takes longer than the rest of a start."""
        warnings.filterwarnings("ignore")
        with pausing_collection():
            _import_vllm()

    def start(self, model: ModelSpec, config: VllmConfig) -> None:
        _, loop, update = _import_vllm()
        with pausing_collection():
            gc.freeze()  # vLLM collects five times of its own while it starts
            cache_mb = config.kv_cache_mb or self.platform.rollout_kv_cache_mb
            build = partial(self.build_engine, model.move_here(), replace(config, kv_cache_mb=cache_mb))
            self.loop = loop.EngineLoop(build)
            self._update_limit, self._open_at_update = update.UpdateLimit(), 0

    def build_engine(self, model: ModelSpec, config: VllmConfig) -> Any:
        """Build the engine, on the thread of ``loop``."""
        engine, *_ = _import_vllm()
        return engine.VllmEngine(model, config, self.platform, self.takes_turns)

    @property
    def engine(self) -> RolloutEngine:
        """The engine, which the thread of ``loop`` alone may call."""
        return self.loop.engine

    def close(self) -> None:
        """Drop the engine. ``start`` may follow, with another model.

        Raises:
            RuntimeError: a fault was planted into this process, so that it must not be used again.
        """
        _refuse_planted("rollout engine")
        if loop := self.__dict__.pop("loop", None):
            loop.call(loop.engine.close)
            loop.close()

    def begin_trace(self, phase: str) -> None:
        self.loop.call(super().begin_trace, phase)  # a trace is of the thread that begins it

    def end_trace(self, path: str) -> None:
        self.loop.call(super().end_trace, path)

    def sample(self, requests, seed: int):
        """Sample the completions of all requests in one round, during which the engine takes no other requests."""
        self._note_work()
        return self.loop.call(self.engine.sample, requests, seed)

    def submit(self, requests) -> None:
        """Submit requests, each with a key, without waiting; ``EngineLoop.submit`` says more."""
        self._note_work()
        self.loop.submit(requests)

    def take(self, timeout_s: float) -> list:
        """Return finished completions of submitted requests; in concurrency group ``POLL`` it blocks no other call."""
        return self.loop.take(timeout_s)

    def seed(self, seed: int) -> None:
        """Draw from the random numbers of ``seed`` from now on, until ``sample`` sets another seed."""
        self.loop.call(self.engine.seed, seed)

    def abort(self, keys) -> None:
        """Abort submitted requests by their keys."""
        self.loop.abort(keys)

    def parse_tools(self, texts, parser: str, tools) -> list:
        """Find the tool calls in each of the texts that this engine's model sampled, by ``parse_tool_calls``."""
        from engines.vllm.tools import parse_tool_calls

        return parse_tool_calls(texts, parser, tools, self.loop.engine.model.folder)

    def get_version(self) -> int:
        return self.engine.version

    def rewind(self, version: int) -> None:
        self.loop.call(self.engine.rewind, version)

    def sleep(self, level: int) -> None:
        self.loop.call(self.engine.sleep, level)

    def wake(self, tags: tuple[Tag, ...]) -> None:
        self.loop.call(self.engine.wake, tags)

    def digest_weights(self, plan: DigestPlan) -> dict[str, int | None]:
        return self.loop.call(self.engine.digest_weights, plan)

    def measure_load(self) -> tuple[float, int]:
        """Return the seconds without requests so far, and the number of open completions at the last update."""
        return self.loop.idle_s, self._open_at_update

    def run(self, function: str, *args):
        """Call ``function(engine, *args)``, where ``function`` is ``module:function``."""
        return self.loop.call(_call_named, self.engine, function, *args)


def _call_named(engine: Any, function: str, *args: Any) -> Any:
    return resolve_name(function)(engine, *args)


def _import_megatron():
    """Import what a training rank computes by; torch then takes the variables of the platform."""
    from engines.megatron import engine, groups

    return engine, groups


def _import_vllm():
    """Import what a rollout engine samples by; vLLM then takes the variables of the platform."""
    from engines.vllm import engine, loop, update

    return engine, loop, update


def _refuse_planted(who: str) -> None:
    """Raise RuntimeError where a fault is planted: mended or not, the process is not handed on to a run."""
    if "engines.probes.faults" in sys.modules:
        raise RuntimeError(f"{who}: faults were planted into this process, so that it ends with its run")
