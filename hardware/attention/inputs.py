"""The attention inputs of a model's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hardware.attention.mask_spec import MaskSpec

if TYPE_CHECKING:  # models without states load nothing of them
    from hardware.attention.delta_rule import DeltaPlan


@dataclass(frozen=True)
class AttentionInputs:
    """The attention inputs of ``model.forward``: a ``MaskSpec`` in the platform's own form.

    They travel as the ``packed_seq_params`` argument of Megatron's forward, of which Megatron reads only ``qkv_format``
    and ``cp_group``; our core attention reads the rest. Activation recomputation keeps that argument by reference but
    would save ``attention_mask`` for backward, which must therefore be a tensor or None.

    Attributes:
        qkv_format: Megatron's name of the layout: ``"sbhd"`` or ``"thd"``.
        attention_mask: mask argument of the backend's forward; None if the core attention reads the rule from ``plan``.
        spec: the mask, with the rule of each layer.
        rotary: ``(cos, sin)`` of this rank's own slots, ``[kinds, s, b, 1, d]`` (sbhd) or ``[kinds, s, 1, d]`` (thd),
            with one kind for each rotary embedding of the model.
        plan: index tensors and masks that the platform's core attention built once for all layers.
        delta: chunks and states of layers without attention; None if there are none.
        deepstack: features that the first layers add to image tokens (``engines.megatron.vision``); None without
            images.
    """

    qkv_format: str
    spec: MaskSpec
    rotary: tuple[Tensor, Tensor]
    plan: Any
    attention_mask: Tensor | None = None
    cp_group: None = None
    delta: DeltaPlan | None = None
    deepstack: Any = None

    @classmethod
    def build(
        cls, spec: MaskSpec, rotary: tuple[Tensor, Tensor], plan: Any, delta: DeltaPlan | None = None
    ) -> AttentionInputs:
        """Build the inputs from ``rotary`` ``[kinds, b, s, d]``, as ``Platform.build_attention_inputs`` takes it.

        Args:
            delta: a platform's own plan of states; None computes them in torch.
        """
        cos, sin = rotary
        if delta is None and any(rule.state for rule in spec.rules):
            from hardware.attention.delta_rule import DeltaPlan

            delta = DeltaPlan.build(spec, cos.device)
        if spec.kind == "bshd":
            turned = cos.transpose(1, 2).unsqueeze(3), sin.transpose(1, 2).unsqueeze(3)
            return cls("sbhd", spec, turned, plan, delta=delta)
        return cls("thd", spec, (cos[:, 0].unsqueeze(2), sin[:, 0].unsqueeze(2)), plan, delta=delta)
