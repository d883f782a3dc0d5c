"""The places where the NPU's masks can be made wrong, for the self-test."""

from hardware.attention.cell import Patch
from hardware.attention.faults import build_attention_faults
from hardware.npu import attention_plan


def list_faults() -> dict[str, list[Patch]]:
    """List the patches of ``NpuPlatform.list_faults``."""
    no_mask = attention_plan.KernelCall(atten_mask=None, sparse_mode=0)
    return build_attention_faults(
        packs=[(attention_plan, "_plan_thd")],
        dense_masks=[(attention_plan, "build_dense_mask")],
        rule_calls=[(attention_plan, "_compressed")],
        without_mask=[(attention_plan, "_compressed", lambda _: lambda *_: no_mask)],
    )
