"""The one door through which hardware enters: a ``Platform`` per kind of machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # settings are checked against a platform before anything takes the time to import torch
    import torch
    from torch import Tensor

    from hardware.attention.cell import Evidence
    from hardware.attention.faults import Patch
    from hardware.attention.inputs import AttentionInputs
    from hardware.attention.mask_spec import MaskSpec


@dataclass(frozen=True)
class Node:
    """What one machine has of a platform's devices.

    Attributes:
        devices: how many. device_gb: memory of each, in GiB.
    """

    devices: int
    device_gb: int


class Platform(Protocol):
    """One kind of machine. Everything that depends on the accelerator goes through these members."""

    name: str
    evidence: Evidence
    """What a check that passes here shows."""
    not_covered: tuple[str, ...]
    """What it says nothing about."""
    proven: Evidence
    """How far this project itself has run the platform."""
    stand_in: str
    """Name of the platform to try its runs with on any machine."""
    node: Node | None
    """The machine whose sizes recipes take; None leaves a recipe the sizes that it states."""
    dist_backend: str
    ray_options: dict
    """Options of one Ray actor that holds one device."""
    attention_backends: tuple[str, ...]
    """Backends of the capability table that it has, the one to be preferred first."""
    max_pack_sequences: int | None
    """Sequences that its kernels take in one pack; None is any number."""
    rollout_head_dims: tuple[int, ...]
    """Attention head sizes that vLLM has kernels for here."""
    rollout_block_tokens: int
    """Tokens whose keys and values vLLM keeps together."""
    rollout_kv_cache_mb: int
    """Memory for keys and values where the settings leave it open."""

    def init_process(self, local_rank: int) -> torch.device:
        """Bind this process to its device and prepare Megatron for it. Call before megatron is imported."""
        ...

    def layer_spec(self, config) -> Any:
        """Megatron's ``TransformerBlockSubmodules`` for a ``TransformerConfig``."""
        ...

    def attention_inputs(
        self, spec: MaskSpec, rotary: tuple[Tensor, Tensor], override: tuple[str, ...] = ()
    ) -> AttentionInputs:
        """Lower a rule to what this platform's core attention honours.

        Args:
            rotary: ``(cos, sin)`` of this rank's slots, ``[b, s, d]`` each.
            override: refused cells of the capability table that are used all the same.

        Raises:
            ValueError: the capability table says that no backend of the platform honours a rule.
        """
        ...

    def around_forward(self, inputs: AttentionInputs) -> AbstractContextManager:
        """What a forward of the model runs within."""
        ...

    def faults(self) -> dict[str, list[Patch]]:
        """The patches that plant each of ``hardware.attention.faults.ATTENTION_FAULTS`` into this platform's own code.

        They name functions of its plan and attention. The self-test plants them in training processes. The controller
        asks for them too, so that this may import torch and not Megatron.
        """
        ...

    def driver_env(self) -> dict[str, str]:
        """Environment of the process that runs the steps, set before it makes large tensors."""
        ...

    def train_env(self) -> dict[str, str]:
        """Environment of a training process, set before torch is imported."""
        ...

    def rollout_env(self) -> dict[str, str]:
        """Environment of a vLLM process, set before vllm is imported."""
        ...


def describe(platform: Platform) -> str:
    """What a report says of where it comes from."""
    text = f"{platform.name} ({platform.evidence})"
    if platform.proven == "untested":
        text += ", which nobody ran this project on before its release: begin with rlworker check"
    return f"{text}, which says nothing about {', '.join(platform.not_covered)}" if platform.not_covered else text
