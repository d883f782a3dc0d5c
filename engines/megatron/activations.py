"""What forward passes keep for their backward passes, and what these take beside it, from the model's shape alone."""

from dataclasses import dataclass

FP32 = 4
_HEAD_LOGITS = 2**25
"""Logits that the head has at once (engines/megatron/logprobs.py)."""


@dataclass(frozen=True)
class MicroBatch:
    """Attributes:
    slots: over all context-parallel ranks. sequences: that share them.
    """

    slots: int = 0
    sequences: int = 1


def get_itemsize(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]
