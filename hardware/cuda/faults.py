"""The places where CUDA's masks can be made wrong, for the self-test."""

from dataclasses import replace

from hardware.attention.cell import Patch
from hardware.attention.faults import build_attention_faults
from hardware.cuda import attention_plan


def list_faults() -> dict[str, list[Patch]]:
    """Return name of a fault -> patches, for ``CudaPlatform.list_faults``."""

    def from_0(locate):
        def count_own(spec, rule):
            places = locate(spec, rule)
            return replace(places, position=places.position - spec.begins[places.sequence])

        return count_own

    return build_attention_faults(
        packs=[(attention_plan, "_plan_pack")],
        calls=[(attention_plan, "_plan_calls")],
        inverted=[(attention_plan, "_convert_window", lambda window: lambda *args: window(*args)[::-1])],
        without_mask=[(attention_plan, "_convert_window", lambda _: lambda rule, sees_future, longest: (longest, -1))],
        from_first_key=[(attention_plan, "_locate_slots", from_0)],
    )
