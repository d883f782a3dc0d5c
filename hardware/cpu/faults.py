"""The places where the CPU's masks can be made wrong, for the self-test."""

import torch.nn.functional as F

from hardware.attention import grouped_sdpa
from hardware.attention.cell import Patch
from hardware.attention.faults import build_attention_faults


def list_faults() -> dict[str, list[Patch]]:
    """Return name of a fault -> patches, for ``CpuPlatform.list_faults``."""
    never_causal = lambda sdpa: lambda *args, is_causal=False, **kwargs: sdpa(*args, **kwargs)  # noqa: E731
    from_0 = lambda mask: lambda spec, rule, rows, query, keys: mask(spec, rule, rows, query - query[0], keys)  # noqa: E731
    return build_attention_faults(
        packs=[(grouped_sdpa, "_plan_thd")],
        dense_masks=[(grouped_sdpa, "build_dense_mask")],
        without_mask=[(F, "scaled_dot_product_attention", never_causal)],
        from_first_key=[(grouped_sdpa, "build_dense_mask", from_0)],
    )
