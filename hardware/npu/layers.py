"""Layers whose arithmetic is one operator on an NPU: the norm, SwiGLU and rotation.

Each computes the same function as the plain layer, in one kernel instead of several. Calls that an operator's
documentation does not allow take the plain layer. Operators are called by ``torch.ops.npu``, so they can be emulated.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from hardware.megatron.layers import RMSNorm, rotate
from hardware.npu.limits import MAX_ROTATED_AXIS, MAX_ROTATED_HEAD


class NpuRMSNorm(RMSNorm):
    """``RMSNorm`` computed by ``npu_rms_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, self.weight, epsilon=self.eps)[0]


class NpuSwigluMLP(MLP):
    """Megatron's MLP with SwiGLU by ``npu_swiglu``, for the configurations that ``find_mlp`` gives it."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_):
        """Compute ``[s, b, h] -> ([s, b, h], None)``; the second is Megatron's place for a bias.

        Raises:
            ValueError: tokens have scales, as those of experts do.
        """
        if per_token_scale is not None:
            raise ValueError("mlp: per_token_scale must be None: npu_swiglu scales no tokens")
        halves, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(torch.ops.npu.npu_swiglu(halves, dim=-1))


def find_mlp(config) -> type[MLP]:
    """Return the MLP class for a ``TransformerConfig``: the fused one if the MLP is only ``silu(gate) * up``."""
    is_gated = config.gated_linear_unit and config.activation_func is F.silu and not config.add_bias_linear
    is_plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    return NpuSwigluMLP if is_gated and is_plain else MLP


def rotate_fused(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` ``[s, b, h, d]`` or ``[s, h, d]`` as ``rotate`` does, by ``npu_rotary_mul`` if it accepts ``x``.

    Args:
        rotary: ``(cos, sin)``, with values from -1 to 1.
    """
    batch = x.shape[1] if x.dim() == 4 else 1
    if max(batch, x.shape[-2]) > MAX_ROTATED_AXIS or x.shape[-1] > MAX_ROTATED_HEAD:
        return rotate(x, rotary)
    if x.dim() == 4:
        return torch.ops.npu.npu_rotary_mul(x, *rotary)
    cos, sin = (each.unsqueeze(1) for each in rotary)
    return torch.ops.npu.npu_rotary_mul(x.unsqueeze(1), cos, sin).squeeze(1)
