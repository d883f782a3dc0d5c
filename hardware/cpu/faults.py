"""The places where the CPU's masks can be made wrong, for the self-test."""

from collections.abc import Callable

import torch.nn.functional as F

from hardware.attention.faults import Patch, build_attention_faults
from hardware.cpu import attention_plan


def list_faults() -> dict[str, list[Patch]]:
    """List the patches of ``CpuPlatform.list_faults``."""
    return build_attention_faults(
        packs=[(attention_plan, "_plan_thd")],
        dense_masks=[(attention_plan, "build_dense_mask")],
        without_mask=[(F, "scaled_dot_product_attention", _never_causal)],
    )


def _never_causal(sdpa: Callable) -> Callable:
    return lambda *args, is_causal=False, **kwargs: sdpa(*args, **kwargs)
