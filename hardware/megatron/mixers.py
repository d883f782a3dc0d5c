"""Mixers: what mixes the tokens of a layer, each with its module, its arithmetic, its memory and its work.

They are data, read and checked without torch. Whoever plans or builds a layer asks its mixer and knows no kind by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hardware.attention.rules import CHUNK, MOST_TAPS
from hardware.megatron.kernel_memory import KernelMemory

_FP32 = 4


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
        if kernels.expands_kv and size == _FP32 and heads.queries != heads.keys:
            keys_and_values = 2 * query * tokens.cp
        sums = heads.queries * _FP32 * slots
        copied = query if kernels.copies_output and tokens.layout == "thd" else 0.0
        return MixerBytes(
            before=before,
            core=query + keys_and_values + sums + copied,
            core_input=core_input,
            output=query,  # with a copy the kernel keeps its own
        )


ATTENTION = Attention()


@dataclass(frozen=True)
class DeltaNet(Mixer):
    """A gated delta net (arXiv:2412.06464) in the place of a layer's attention.

    Attributes:
        key_heads: heads of queries and keys. ratio: value heads that share a key head.
        key_dim, value_dim: sizes of a head.
        taps: tokens that the convolution reads, the own among them.
    """

    module: ClassVar[str] = "hardware.megatron.delta_net:GatedDeltaNet"
    rollout_settings: ClassVar[Mapping[str, str]] = {"mamba_ssm_cache_dtype": "float32"}
    """vLLM's states are of the trainer's type, whatever the weights'."""

    key_heads: int
    ratio: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def convolved(self) -> int:
        """Columns of a key head that are convolved: its query, itself, and its values."""
        return 2 * self.key_dim + self.ratio * self.value_dim

    @property
    def columns(self) -> int:
        """All columns of a key head: beside those two gates of each value head, and the gate of its output."""
        return self.convolved + self.ratio * (2 + self.value_dim)

    @property
    def entries(self) -> int:
        """Entries of all states of a layer."""
        return self.key_heads * self.ratio * self.key_dim * self.value_dim

    def list_cuts(self) -> dict[str, int]:
        return {"key heads of layers with a state": self.key_heads}

    def count_state_bytes(self, itemsize: int) -> int:
        inputs = (self.taps - 1) * self.convolved * self.key_heads
        return inputs * itemsize + self.entries * _FP32

    def count_token_flops(self) -> int:
        return 6 * self.entries  # three products of a state

    def count_kept(self, tokens: MixedTokens) -> MixerBytes:
        """Count the bytes that a layer with a state keeps.

        The core is the convolution and the rule, over the slots of all context-parallel ranks: chunks of the
        projection's columns, before and after convolution and activation; in fp32 queries and keys before they are
        normed, as they are and as they are multiplied, right sides and solutions of the chunks' systems, the products
        between tokens of a chunk, and where sequences have several chunks what goes from chunk to chunk. The output
        keeps the core's before and after its norm, the gate's activation, their product and the projection's input.
        """
        size, slots = tokens.size, tokens.slots
        length = tokens.all_slots / tokens.sequences
        heads = self.key_heads * self.ratio
        mixed, queries = self.key_heads * self.convolved, self.key_heads * self.key_dim
        keys, values = heads * self.key_dim, heads * self.value_dim
        pairs = min(CHUNK, max(1, length))
        between_chunks = 4 * keys + values + 2 * keys * self.value_dim / CHUNK if length > CHUNK else 0.0
        rule = 6 * queries + 2 * values + (4 * heads + 2 * self.key_heads) * pairs + 7 * heads + between_chunks
        rule += 0 if size == _FP32 else 2 * queries
        columns = mixed + 2 * heads
        core = (1 + (MOST_TAPS - 1) / pairs) * columns * size + 2 * mixed * size + rule * _FP32
        return MixerBytes(
            before=self.key_heads * self.columns * size * slots,  # the gate is a view of all columns
            core=core * slots * tokens.cp,
            core_input=columns * size * slots * tokens.cp,
            output=values * slots * (2 * size + 3 * _FP32),
        )
