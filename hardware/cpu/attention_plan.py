"""The CPU's lowering: grouped SDPA, for the rules that the capability table lets it compute."""

from torch import Tensor

from hardware.attention.capabilities import find_backend
from hardware.attention.grouped_sdpa import build_attention_inputs
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec
from hardware.platform import Platform


def lower(
    platform: Platform, spec: MaskSpec, rotary: tuple[Tensor, Tensor], override: tuple[str, ...]
) -> AttentionInputs:
    """Lower a mask, as ``Platform.build_attention_inputs`` says."""
    for rule in set(spec.rules):
        find_backend(platform.attention_backends, spec.kind, spec.cp, rule, override)
    return build_attention_inputs(spec, rotary)
