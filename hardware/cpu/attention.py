"""Core attention of the CPU platform: torch's SDPA over groups of sequences of similar length."""

from typing import Any

from torch import Tensor

from hardware.attention.grouped_sdpa import GroupedPlan, attend_groups
from hardware.attention.rules import Rule
from hardware.megatron import layers
from hardware.megatron.layers import CoreAttention


class CpuAttention(CoreAttention):
    """Core attention by one SDPA call for a batch of rows, or for each group of a pack."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: GroupedPlan, rule: Rule) -> Tensor:
        return attend_groups(query, key, value, plan, rule, self.softmax_scale)


def build_layer_spec(config, options) -> Any:
    """Build the layers of a stage, as ``Platform.build_layer_spec`` says."""
    return layers.build_layer_spec(config, options, CpuAttention)
