"""The one door through which hardware enters: a ``Platform`` per kind of machine."""

from __future__ import annotations

import os
import resource
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from hardware.megatron.form import PLAIN, LayerOptions
from hardware.megatron.kernel_memory import KernelMemory

if TYPE_CHECKING:  # settings are checked against a platform before anything takes the time to import torch
    import torch
    from torch import Tensor

    from hardware.attention.cell import Evidence, Patch
    from hardware.attention.contract import KernelContract
    from hardware.attention.inputs import AttentionInputs
    from hardware.attention.mask_spec import MaskSpec

HOST = "host"
"""The way of new weights to rollout engines in buckets through the host's memory, which every platform has."""


@dataclass(frozen=True)
class Node:
    """A machine's devices.

    Attributes:
        devices: number of devices. device_gb: memory of each device, in GiB.
    """

    devices: int
    device_gb: int


@dataclass(frozen=True)
class RolloutWorkerClass:
    """A worker class of vLLM.

    Attributes:
        name: module and class; "auto" is vLLM's own choice.
        parts: names of the classes that must build attention metadata, carry states and sample, once the worker has
            started; empty if vLLM chooses among several.
    """

    name: str = "auto"
    parts: tuple[str, ...] = ()


class Profiler(Protocol):
    """A recorder of a trace, such as ``torch.profiler.profile``."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None: ...


class Platform(Protocol):
    """One kind of machine. Everything that depends on the accelerator goes through these members.

    A platform is a subclass that overrides what differs from the definitions here.
    """

    name: str
    room: str
    """Package of its layers and kernels: ``attention`` (``build_layer_spec``), ``attention_plan`` (``lower``) and
    ``faults`` (``list_faults``), which ``load`` imports."""
    evidence: Evidence
    """Level of proof of a check that passes here: executed or emulated."""
    not_covered: tuple[str, ...] = ()
    """Subjects that a check here does not cover."""
    proven: Evidence
    """How far this project itself has run the platform."""
    stand_in: str
    """Name of the platform on which its runs can be tried on any machine."""
    node: Node | None
    """The machine from which recipes take their sizes; None leaves a recipe the sizes that it states."""
    default_dtype: str
    """Default type of the engines' weights and activations on this platform."""
    dist_backend: str
    interface_variables: tuple[str, ...]
    """Environment variables that name the network interface of its collectives."""
    ray_options: dict
    """Options of one Ray actor that holds one device."""
    visible_devices: str | None
    """Environment variable that lists the devices which a process sees; None if the platform has no devices."""
    can_sleep: bool
    """Whether a vLLM engine can release the memory of its devices and take it again."""
    attention_backends: tuple[str, ...]
    """Backends of the capability table that the platform has, in order of preference."""
    max_pack_sequences: int | None
    """Most sequences that its kernels take in one pack; None sets no limit."""
    kernel_memory: KernelMemory
    """Memory that its kernels allocate."""
    shares_prompts: bool
    """Whether this project has seen it compute shared prompts rightly, so that they are shared by default."""
    repeats: bool
    """Whether its numbers repeat bit for bit without deterministic settings."""
    rollout_head_dims: tuple[int, ...]
    """Sizes of attention heads for which vLLM has kernels here."""
    rollout_backends: tuple[str, ...]
    """vLLM's attention backends on the machines where this platform rolls out, in order of preference; they are keys of
    the table in hardware.attention.rollouts."""
    rollout_block_tokens: int
    """Number of tokens in a block of vLLM's KV cache."""
    records_routes: bool = False
    """Whether its vLLM worker records the experts of every token."""
    returns_routes: bool = False
    """Whether vLLM returns the experts of every token here, by records of its own."""
    rollout_settings: dict[str, Any]
    """Arguments of vLLM's LLM that apply unless the settings give them."""
    rollout_kv_cache_mb: int
    """Memory for keys and values in MB, unless the settings give it."""
    ways_from_all_ranks: tuple[str, ...] = ()
    """Ways of weights to rollout engines in which every training rank hands over all weights, and not one for all."""

    def load(self, part: str, room: str = "") -> Any:
        """Import a module of the platform's package on first use: settings are checked without torch and Megatron.

        Args:
            room: another package of hardware.
        """
        return import_module(f"{room or self.room}.{part}")

    @abstractmethod
    def init_process(self, local_rank: int) -> torch.device:
        """Bind this process to its device and prepare Megatron for it. Call before megatron is imported."""
        ...

    def get_device_key(self) -> str | None:
        """Return an identifier of this process's device, unique among all devices; None where ranks may share one."""
        return None

    def build_layer_spec(self, config, options: Sequence[LayerOptions] = (PLAIN,)) -> Any:
        """Build Megatron's ``TransformerBlockSubmodules`` for a ``TransformerConfig``.

        Args:
            options: of each layer of this pipeline stage.
        """
        return self.load("attention").build_layer_spec(config, options)

    def build_attention_inputs(
        self, spec: MaskSpec, rotary: tuple[Tensor, Tensor], override: tuple[str, ...] = ()
    ) -> AttentionInputs:
        """Lower the mask of a micro-batch to the inputs of this platform's core attention.

        Args:
            spec: the mask.
            rotary: ``(cos, sin)`` of this rank's slots, ``[kinds, b, s, d]`` each.
            override: names of refused cells of the capability table to use nevertheless.

        Raises:
            ValueError: no backend of the platform can compute a rule, by the capability table.
        """
        return self.load("attention_plan").lower(self, spec, rotary, override)

    def wrap_forward(self, inputs: AttentionInputs) -> AbstractContextManager:
        """Return the context in which a forward of the model runs."""
        return nullcontext()

    def build_contract(self, device: torch.device) -> KernelContract | None:
        """Build the contract of the attention kernel, to test it on ``device``; None if the kernel has none."""
        return None

    def list_faults(self) -> dict[str, list[Patch]]:
        """Return name of a fault in ``ATTENTION_FAULTS`` (hardware.attention.faults) -> patches that plant it.

        The patches name functions of the platform's plan and attention. The self-test plants them in training
        processes. The controller calls this too, so it may import torch but not Megatron.
        """
        return self.load("faults").list_faults()

    def explain_slow(self, dtype: str) -> str:
        """Explain why engines of this dtype are slow on this machine; empty if they are not."""
        return ""

    def get_driver_env(self) -> dict[str, str]:
        """Return environment variables for the process that runs the steps, to set before it makes large tensors."""
        return {}

    def get_train_env(self) -> dict[str, str]:
        """Return environment variables for a training process, to set before torch is imported."""
        return {"TOKENIZERS_PARALLELISM": "false"}

    def get_deterministic_env(self) -> dict[str, str]:
        """Return environment variables with which a training process repeats its numbers.

        They are set before the process computes or communicates, and torch's deterministic algorithms are needed as
        well.
        """
        return {}

    def measure_peak_memory(self) -> int:
        """Return the peak memory of this process in bytes: of tensors on its device, or on a CPU of everything."""
        if self.visible_devices is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        import torch

        return torch.get_device_module().max_memory_allocated()

    def build_profiler(self) -> Profiler:
        """Return a recorder of the operators of this process and of its device."""
        from torch.profiler import profile

        return profile()

    def get_rollout_env(self) -> dict[str, str]:
        """Return environment variables for a vLLM process, to set before vllm is imported."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def find_weight_ways(self, colocated: bool) -> tuple[str, ...]:
        """Return the ways by which new weights can reach rollout engines, the preferred one first.

        A way is ``HOST``, buckets in the host's memory, or a backend of vLLM's weight transfer.

        Args:
            colocated: whether trainers and rollout engines share devices.
        """
        return (HOST,)

    def make_trainer_info(
        self, way: str, rank: int, world_size: int, address: tuple[str, int], chunk: int, largest: int
    ) -> Any:
        """Make vLLM's settings of a sender of weights (``TrainerInitInfo``), and register its engine where it is ours.

        Args:
            way: a backend of ``find_weight_ways``. rank: 0 for the rank that leads the transfer.
            world_size: number of processes of a group of that rank and all vLLM workers.
            address: host and free port of that rank.
            chunk: bytes that travel at a time. largest: bytes of the largest tensor.
        """
        raise NotImplementedError

    def check_vllm_features(self, backend: str, spreads_experts: bool) -> None:
        """Raise ValueError if the installed version of vLLM is too old for what a rollout asks of it here.

        Args:
            backend: its attention's. spreads_experts: whether each device of an engine has some of the experts whole.
        """
        return

    def find_rollout_worker(self, backend: str) -> RolloutWorkerClass:
        """Return the vLLM worker class that computes attention by ``backend``, one of ``rollout_backends``."""
        return RolloutWorkerClass()  # vLLM refuses a backend that does not know the rules of a model, and takes another


def make_ray_options(platform: Platform, devices: int = 1) -> dict:
    """Return the options of a Ray actor that holds ``devices`` devices."""
    options = platform.ray_options
    counts = {name: count * devices for name, count in options.items() if name in ("num_cpus", "num_gpus")}
    others = {name: count * devices for name, count in options.get("resources", {}).items()}
    return options | counts | ({"resources": others} if others else {})


def list_ray_resources(platform: Platform, devices: int = 1) -> dict[str, float]:
    """Return resource -> amount that Ray reserves for one worker with ``devices`` devices."""
    options = make_ray_options(platform, devices)
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **options.get("resources", {})}
    return {name: count for name, count in named.items() if count}


def describe(platform: Platform) -> str:
    """Describe a platform in a line: name, level of proof, and the subjects that the proof does not cover."""
    text = f"{platform.name} ({platform.evidence})"
    if platform.proven == "untested":
        text += ", on which no whole run was made before its release: begin with rlworker check"
    return f"{text}, which says nothing about {', '.join(platform.not_covered)}" if platform.not_covered else text
