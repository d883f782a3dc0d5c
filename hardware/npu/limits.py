"""Limits of the NPU's attention operator, as numbers that need no torch to be read."""

MAX_PACK_SEQUENCES = 1024
"""Sequences that ``npu_fusion_attention`` takes in TND (op-plugin documentation)."""
