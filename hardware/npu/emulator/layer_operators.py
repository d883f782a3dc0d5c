"""``npu_rms_norm``, ``npu_swiglu`` and ``npu_rotary_mul`` on a CPU: each by its documented formula and limits.

The documentation is that of torch-npu 2.10.0.post4, in ``torch_npu/_op_plugin_docs.py`` of its wheel.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hardware.attention.contract import NotEmulatedError, Requirement, Source, check_call
from hardware.npu.limits import MAX_ROTATED_AXIS, MAX_ROTATED_HEAD

_D = Source("torch-npu documentation", refuses=False)
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_Rule = Requirement[SimpleNamespace]
_ROTARY_LAYOUTS = ((2,), (1,), (0,), (0, 2), (0, 1), (0, 1, 2))
"""Dimensions that cosines share with the rotated tensor: 11SD, 1S1D, S11D, B1SD, BS1D or SB1D, and all."""


def _has_rotary_layout(call: SimpleNamespace) -> bool:
    """Check that cosines and sines have one of the documented layouts, each of which is 1 in other dimensions."""

    def fits(part: Tensor, dims: tuple[int, ...]) -> bool:
        want = [size if dim in dims else 1 for dim, size in enumerate(call.self.shape[:3])]
        return list(part.shape) == [*want, call.self.shape[3]]

    return any(fits(call.r1, dims) and fits(call.r2, dims) for dims in _ROTARY_LAYOUTS)


REQUIREMENTS: dict[str, tuple[_Rule, ...]] = {
    "npu_rms_norm": (
        _Rule(
            "rms_norm dtype",
            _D,
            lambda c: c.self.dtype in _TYPES and c.gamma.dtype == c.self.dtype,
            lambda c: f"self and gamma are both fp16, bf16 or fp32, got {c.self.dtype} and {c.gamma.dtype}",
        ),
        _Rule(
            "rms_norm rank",
            _D,
            lambda c: 2 <= c.self.dim() <= 8,
            lambda c: f"self has 2 to 8 dimensions, got {c.self.dim()}",
        ),
        _Rule(
            "gamma",
            _D,
            lambda c: 0 < c.gamma.dim() <= c.self.dim() and c.self.shape[-c.gamma.dim() :] == c.gamma.shape,
            lambda c: f"gamma has the last dimensions of self {tuple(c.self.shape)}, got {tuple(c.gamma.shape)}",
        ),
    ),
    "npu_swiglu": (
        _Rule("swiglu dtype", _D, lambda c: c.self.dtype in _TYPES, lambda c: f"fp16, bf16 or fp32: {c.self.dtype}"),
        _Rule(
            "swiglu rank",
            _D,
            lambda c: 1 <= c.self.dim() <= 8 and -c.self.dim() <= c.dim < c.self.dim(),
            lambda c: f"self has 1 to 8 dimensions, of which dim is one, got {c.self.dim()} and dim {c.dim}",
        ),
        _Rule(
            "halves",
            _D,
            lambda c: c.self.shape[c.dim] % 2 == 0 and c.self.numel() > 0,
            lambda c: f"self is cut in halves along dim {c.dim} and is not empty, got {tuple(c.self.shape)}",
        ),
        _Rule("contiguous", _D, lambda c: c.self.is_contiguous(), lambda c: f"contiguous, got {c.self.stride()}"),
    ),
    "npu_rotary_mul": (
        _Rule(
            "rotary rank",
            _D,
            lambda c: c.self.dim() == c.r1.dim() == c.r2.dim() == 4,
            lambda c: f"self, r1 and r2 have 4 dimensions, got {[x.dim() for x in (c.self, c.r1, c.r2)]}",
        ),
        _Rule(
            "rotary dtype",
            _D,
            lambda c: c.self.dtype in _TYPES and c.self.dtype == c.r1.dtype == c.r2.dtype,
            lambda c: f"all are fp16, bf16 or fp32, got {[x.dtype for x in (c.self, c.r1, c.r2)]}",
        ),
        _Rule(
            "rotary layout",
            _D,
            _has_rotary_layout,
            lambda c: f"r1 and r2 lie over self {tuple(c.self.shape)}, got {tuple(c.r1.shape)}, {tuple(c.r2.shape)}",
        ),
        _Rule(
            "rotary head size",
            _D,
            lambda c: c.self.shape[-1] % 2 == 0 and c.self.shape[-1] <= MAX_ROTATED_HEAD,
            lambda c: f"heads are even and at most {MAX_ROTATED_HEAD} wide, got {c.self.shape[-1]}",
        ),
        _Rule(
            "rows and heads",
            _D,
            lambda c: sorted(c.self.shape[:3])[1] <= MAX_ROTATED_AXIS,
            lambda c: f"there are at most {MAX_ROTATED_AXIS} rows and heads, got {tuple(c.self.shape)}",
        ),
        _Rule(
            "rotary range",
            _D,
            lambda c: bool(torch.stack([x.abs().max() for x in (c.r1, c.r2)]).max() <= 1),
            lambda c: "r1 and r2 are from -1 to 1",
        ),
    ),
}


def _rms_norm(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Compute ``x / rms(x) * gamma`` over gamma's dimensions, in fp32, and ``1 / rms(x)``."""
    x, dims = call.self.float(), tuple(range(-call.gamma.dim(), 0))
    inverse = (x.square().mean(dims, keepdim=True) + call.epsilon).rsqrt()
    return (x * inverse * call.gamma.float()).to(call.self.dtype), inverse


def _swiglu(call: SimpleNamespace) -> Tensor:
    """Compute ``A * sigmoid(A) * B`` of the halves A and B."""
    gate, up = (half.float() for half in call.self.chunk(2, call.dim))
    return (gate * gate.sigmoid() * up).to(call.self.dtype)


def _rotary_mul(call: SimpleNamespace) -> Tensor:
    """Compute ``r1 * x + r2 * (-x2, x1)`` of the halves x1 and x2."""
    if call.rotary_mode != "half" or call.rotate is not None:
        raise NotEmulatedError("npu_rotary_mul, emulated: rotary_mode but 'half', and rotate, are not computed")
    left, right = call.self.chunk(2, -1)
    return call.r1 * call.self + call.r2 * torch.cat([-right, left], dim=-1)


_COMPUTE = {"npu_rms_norm": _rms_norm, "npu_swiglu": _swiglu, "npu_rotary_mul": _rotary_mul}


def compute(operator: str, arguments: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Check a call of an operator in ``REQUIREMENTS`` and compute it.

    Args:
        operator: name of the operator. arguments: all arguments of its schema, by name.

    Raises:
        RefusedError: the call breaks a requirement.
        NotEmulatedError: a device computes the call and this emulator does not.
    """
    call = SimpleNamespace(**arguments)
    check_call(operator, REQUIREMENTS[operator], call)
    return _COMPUTE[operator](call)
