"""Mixers that carry a state from token to token, as data that is read and checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hardware.attention.rules import CHUNK, MOST_TAPS
from hardware.megatron.mixers import FP32, MixedTokens, Mixer, MixerBytes


@dataclass(frozen=True)
class DeltaNet(Mixer):
    """A gated delta net (arXiv:2412.06464) in the place of a layer's attention.

    Attributes:
        key_heads: heads of queries and keys. ratio: value heads that share a key head.
        key_dim, value_dim: sizes of a head.
        taps: tokens that the convolution reads, the own among them.
    """

    module: ClassVar[str] = "hardware.megatron.states.delta_net:GatedDeltaNet"
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
        return inputs * itemsize + self.entries * FP32

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
        rule += 0 if size == FP32 else 2 * queries
        columns = mixed + 2 * heads
        core = (1 + (MOST_TAPS - 1) / pairs) * columns * size + 2 * mixed * size + rule * FP32
        return MixerBytes(
            before=self.key_heads * self.columns * size * slots,  # the gate is a view of all columns
            core=core * slots * tokens.cp,
            core_input=columns * size * slots * tokens.cp,
            output=values * slots * (2 * size + 3 * FP32),
        )
