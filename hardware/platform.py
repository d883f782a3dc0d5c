"""The one door through which hardware enters: a ``Platform`` per kind of machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # settings are checked against a platform before anything takes the time to import torch
    import torch
    from torch import Tensor

    from hardware.capabilities import Evidence
    from hardware.masks import MaskSpec


PlatformName = Literal["cpu", "npu", "npu-emulated"]


@dataclass(frozen=True)
class AttentionInputs:
    """What ``model.forward`` receives about attention: the platform's own form of a ``MaskSpec``.

    It travels as the ``packed_seq_params`` argument of Megatron's forward, from which Megatron reads ``qkv_format`` and
    ``cp_group`` alone; our core attention reads the rest. Activation recomputation keeps that argument by reference
    but would save ``attention_mask`` for backward, which must therefore be a tensor or None.

    Attributes:
        qkv_format: Megatron's word for the layout: ``"sbhd"`` or ``"thd"``.
        attention_mask: what the backend's forward takes as its mask; None where the core attention knows the rule.
        spec: the rule, which names each layer's window.
        rotary: ``(cos, sin)`` of this rank's own slots, ``[s, b, 1, d]`` (sbhd) or ``[s, 1, d]`` (thd).
        plan: index tensors and masks that the platform's core attention built once for all layers.
        deepstack: what the first layers add to their image tokens (``engines.megatron.vision``); None without images.
    """

    qkv_format: str
    spec: MaskSpec
    rotary: tuple[Tensor, Tensor]
    plan: Any
    attention_mask: Tensor | None = None
    cp_group: None = None
    deepstack: Any = None

    @classmethod
    def of(cls, spec: MaskSpec, rotary: tuple[Tensor, Tensor], plan: Any) -> AttentionInputs:
        """``rotary`` as ``Platform.attention_inputs`` is given it: ``[b, s, d]``."""
        if spec.kind == "bshd":
            return cls("sbhd", spec, tuple(x.transpose(0, 1).unsqueeze(2) for x in rotary), plan)  # [s, b, 1, d]
        return cls("thd", spec, tuple(x[0].unsqueeze(1) for x in rotary), plan)  # [s, 1, d]


class Platform(Protocol):
    """One kind of machine. Everything that depends on the accelerator goes through these members."""

    name: str
    evidence: Evidence
    """What a check that passes here shows."""
    not_covered: tuple[str, ...]
    """What it says nothing about."""
    proven: Evidence
    """How far this project itself has run the platform."""
    stand_in: PlatformName
    """The platform to try its runs with on any machine."""
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

    def layer_spec(self, config) -> Any:
        """Megatron's ``TransformerBlockSubmodules`` for a ``TransformerConfig``."""

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

    def around_forward(self, inputs: AttentionInputs) -> AbstractContextManager:
        """What a forward of the model runs within."""

    def driver_env(self) -> dict[str, str]:
        """Environment of the process that runs the steps, set before it makes large tensors."""

    def train_env(self) -> dict[str, str]:
        """Environment of a training process, set before torch is imported."""

    def rollout_env(self) -> dict[str, str]:
        """Environment of a vLLM process, set before vllm is imported."""


def describe(platform: Platform) -> str:
    """What a report says of where it comes from."""
    text = f"{platform.name} ({platform.evidence})"
    if platform.proven == "untested":
        text += ", which nobody ran this project on before its release: begin with rlworker check"
    return f"{text}, which says nothing about {', '.join(platform.not_covered)}" if platform.not_covered else text


def get_platform(name: str) -> Platform:
    """The platform called ``name``. Raises ValueError when there is none."""
    from hardware.cpu import CpuPlatform
    from hardware.npu import EmulatedNpuPlatform, NpuPlatform

    platforms = {platform.name: platform for platform in (CpuPlatform, NpuPlatform, EmulatedNpuPlatform)}
    if name not in platforms:
        raise ValueError(f"platform: {name!r} is not available, expected one of {list(platforms)}")
    return platforms[name]()
