"""Mixers: what mixes the tokens of a layer, each with its module, its arithmetic, its memory and its work.

They are data, read and checked without torch. Whoever plans or builds a layer asks its mixer and knows no kind by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hardware.megatron.kernel_memory import KernelMemory

FP32 = 4
"""Bytes of a number of float32."""


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention: number of queries' and of keys' and values', and the size of each."""

    queries: int
    keys: int
    dim: int

    def count_keys(self, tp: int) -> int:
        """Count the heads of keys on each of ``tp`` ranks; where there are fewer heads, several ranks have the same."""
        return max(1, self.keys // tp)


@dataclass(frozen=True, kw_only=True)
class MixedTokens:
    """The tokens that a rank mixes in a micro-batch, and how.

    Attributes:
        heads: of the model's attention. has_qk_norm: queries and keys are normed head by head.
        size: bytes of a number. slots: of this rank's part, of tensors that are cut over tp and cp.
        all_slots: over all context-parallel ranks. sequences: number of sequences.
        recompute, layout, tp, cp: as in the engine's settings.
        norm_input: bytes that a norm keeps of this rank's part for each column of its input.
    """

    heads: Heads
    has_qk_norm: bool
    size: int
    slots: float
    all_slots: float
    sequences: int
    recompute: str
    layout: str
    tp: int
    cp: int
    norm_input: float
    kernels: KernelMemory


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """The tokens that a rank gives to a layer of experts in a micro-batch, and how.

    Attributes:
        hidden: width of a hidden state. size: bytes of a number.
        ep, etp: as in the engine's settings.
        share: rows that come to a rank's experts for each that would come if all experts got equally many.
    """

    hidden: int
    size: int
    ep: int
    etp: int
    share: float = 1.0


@dataclass(frozen=True)
class MixerBytes:
    """Bytes that a mixer keeps for the backward pass on a rank.

    Attributes:
        before: kept from before the core: queries, keys and values before they are rotated, or a state's columns.
        core: by the core. core_input: in place of ``core`` where the core is recomputed.
        output: by the output projection.
    """

    before: float
    core: float
    core_input: float
    output: float


class Mixer(ABC):
    """A mixer mixes the tokens of a layer.

    Attributes:
        module: its module, ``module:class``; empty for Megatron's own self-attention around a platform's core.
        rollout_settings: settings of vLLM that it needs.
    """

    module: ClassVar[str] = ""
    rollout_settings: ClassVar[Mapping[str, str]] = {}

    def list_cuts(self) -> dict[str, int]:
        """List the numbers that tensor parallelism must divide, beside those of attention, by name in a message."""
        return {}

    def count_cached(self, heads: Heads, tp: int) -> int:
        """Count the numbers that a device of ``tp`` keeps of each token for those that follow."""
        return 0

    def count_state_bytes(self, itemsize: int) -> int:
        """Count the bytes that are kept of a sequence, whatever its length.

        Args:
            itemsize: bytes of a number that is of the weights' type.
        """
        return 0

    def count_pair_flops(self, heads: Heads) -> int:
        """Count the FLOPs of a forward pass for each pair of a query and a key that it sees."""
        return 0

    def count_token_flops(self) -> int:
        """Count the FLOPs of a forward pass for each token, beside products with weights."""
        return 0

    @abstractmethod
    def count_kept(self, tokens: MixedTokens) -> MixerBytes:
        """Count the bytes that the mixer keeps for the backward pass, tensor by tensor."""


@dataclass(frozen=True)
class Attention(Mixer):
    """Attention over keys and values, grouped or not."""

    def count_cached(self, heads: Heads, tp: int) -> int:
        return 2 * heads.count_keys(tp) * heads.dim

    def count_pair_flops(self, heads: Heads) -> int:
        return 4 * heads.queries * heads.dim  # two products

    def count_kept(self, tokens: MixedTokens) -> MixerBytes:
        """Count the bytes that attention keeps.

        Values are a view into the projection's output, which therefore stays whole, unless context parallelism gathers
        them; where ranks share a head of keys and values it is the output of all ranks. A rotation that keeps its input
        keeps the queries, and the keys where a norm made them.
        """
        heads, kernels, size, slots = tokens.heads, tokens.kernels, tokens.size, tokens.slots
        kv_heads = heads.count_keys(tokens.tp) * tokens.tp  # over all ranks, of which several may have the same
        query, key = (count * heads.dim * size * slots for count in (heads.queries, kv_heads))
        before, core_input = query + 2 * key, query
        if tokens.tp > heads.keys:
            before = (heads.queries + 2 * heads.keys) * heads.dim * size * slots * tokens.tp
        if tokens.has_qk_norm:  # a fused norm keeps its input, which for keys is a view into a kept tensor
            normed_queries, normed_keys = (count * heads.dim * tokens.norm_input for count in (heads.queries, kv_heads))
            before += normed_queries + normed_keys - (key if kernels.keeps_own_input(size) else 0)
            core_input += key
        elif tokens.cp > 1 and tokens.recompute != "core" and not kernels.keeps_unrotated:
            before = 0.0
        if kernels.keeps_unrotated:
            before += query + (key if tokens.has_qk_norm else 0)
        keys_and_values = 2 * key * tokens.cp if tokens.cp > 1 else key
        if kernels.expands_kv and size == FP32 and heads.queries != heads.keys:
            keys_and_values = 2 * query * tokens.cp
        sums = heads.queries * FP32 * slots
        copied = query if kernels.copies_output and tokens.layout == "thd" else 0.0
        return MixerBytes(
            before=before,
            core=query + keys_and_values + sums + copied,
            core_input=core_input,
            output=query,  # with a copy the kernel keeps its own
        )


ATTENTION = Attention()
