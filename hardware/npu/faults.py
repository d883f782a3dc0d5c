"""The places where the NPU's masks can be made wrong, for the self-test."""

from hardware.attention.cell import Patch
from hardware.attention.faults import build_attention_faults
from hardware.npu import attention_plan


def list_faults() -> dict[str, list[Patch]]:
    """Return name of a fault -> patches, for ``NpuPlatform.list_faults``."""
    no_mask = attention_plan.KernelCall(atten_mask=None, sparse_mode=0)
    from_0 = lambda call: lambda rule, mode, device: call(rule, 2 if mode == 3 else mode, device)  # noqa: E731
    return build_attention_faults(
        packs=[(attention_plan, "_plan_thd"), (attention_plan, "_plan_indexed")],
        dense_masks=[(attention_plan, "build_dense_mask")],
        rule_calls=[(attention_plan, "_compressed")],
        without_mask=[(attention_plan, "_compressed", lambda _: lambda *_: no_mask)],
        from_first_key=[(attention_plan, "_compressed", from_0)],
    )
