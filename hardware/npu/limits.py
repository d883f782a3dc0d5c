"""Limits of the NPU's operators, as numbers that need no torch to be read."""

MAX_PACK_SEQUENCES = 1024
"""Most sequences that ``npu_fusion_attention`` takes in TND (op-plugin documentation)."""
MAX_ROTATED_AXIS, MAX_ROTATED_HEAD = 999, 894
"""Most rows or heads, and largest even head size, that ``npu_rotary_mul`` takes (torch-npu documentation)."""
MAX_GROUPS, MAX_GROUPED_WIDTH = 1024, 65535
"""Most groups, and longest last dimension, that ``npu_grouped_matmul`` takes (torch-npu documentation)."""
