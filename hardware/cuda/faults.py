"""The places where CUDA's masks can be made wrong, for the self-test."""

from hardware.attention.cell import Patch
from hardware.attention.faults import build_attention_faults
from hardware.cuda import attention_plan


def list_faults() -> dict[str, list[Patch]]:
    """List the patches of ``CudaPlatform.list_faults``."""
    return build_attention_faults(
        packs=[(attention_plan, "_plan_pack")],
        calls=[(attention_plan, "_plan_calls")],
        inverted=[(attention_plan, "_convert_window", lambda window: lambda *args: window(*args)[::-1])],
        without_mask=[(attention_plan, "_convert_window", lambda _: lambda rule, sees_future, longest: (longest, -1))],
    )
