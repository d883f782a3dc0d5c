"""The NPU's operators for norms, SwiGLU and rotation: their contract, and that they compute what plain torch does."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.attention import check_refusals

from hardware.attention.contract import NotEmulatedError
from hardware.npu.emulator.layer_operators import REQUIREMENTS
from hardware.npu.emulator.operator import install
from hardware.npu.limits import MAX_ROTATED_AXIS, MAX_ROTATED_HEAD

BF16 = torch.bfloat16


def make_call(operator: str, **changes) -> dict:
    generator = torch.Generator().manual_seed(0)
    x, angle = torch.randn(5, 2, 3, 8, generator=generator), torch.rand(5, 2, 1, 8, generator=generator)
    given = {
        "npu_rms_norm": {"self": x, "gamma": angle[0, 0, 0], "epsilon": 1e-5},
        "npu_swiglu": {"self": x},
        "npu_rotary_mul": {"self": x, "r1": angle.cos(), "r2": angle.sin()},
    }
    return given[operator] | changes


EXAMPLES = {
    "rms_norm dtype": (dict(gamma=torch.ones(8, dtype=BF16)), {}),
    "rms_norm rank": (dict(self=torch.ones(8)), dict(self=torch.ones(2, 8))),
    "gamma": (dict(gamma=torch.ones(4)), dict(gamma=torch.ones(3, 8))),
    "swiglu dtype": (dict(self=torch.ones(2, 4, dtype=torch.float64)), dict(self=torch.ones(2, 4, dtype=BF16))),
    "swiglu rank": (dict(dim=4), dict(dim=-4, self=torch.ones(2, 3, 4, 5))),
    "halves": (dict(self=torch.ones(2, 3)), dict(self=torch.ones(2, 3), dim=0)),
    "contiguous": (dict(self=torch.ones(4, 2).T), dict(self=torch.ones(4, 2))),
    "rotary rank": (dict(self=torch.ones(5, 3, 8)), {}),
    "rotary dtype": (dict(r1=torch.ones(5, 2, 1, 8, dtype=BF16)), {}),
    "rotary layout": (dict(r1=torch.ones(1, 2, 3, 8)), {name: torch.ones(1, 1, 3, 8) for name in ("r1", "r2")}),
    "rotary head size": ({name: torch.ones(1, 1, 1, 7) for name in ("self", "r1", "r2")}, {}),
    "rows and heads": (
        {name: torch.ones(1000, 1000, 1, 2) for name in ("self", "r1", "r2")},
        {name: torch.ones(1000, MAX_ROTATED_AXIS, 1, 2) for name in ("self", "r1", "r2")},
    ),
    "rotary range": (dict(r2=torch.full((5, 2, 1, 8), 1.2)), {}),
}


@pytest.fixture(scope="module", autouse=True)
def operators():
    install()


def call(operator: str, **changes) -> torch.Tensor:
    found = getattr(torch.ops.npu, operator)(**make_call(operator, **changes))
    return found[0] if isinstance(found, tuple) else found


def test_a_call_that_breaks_a_requirement_raises_and_one_that_keeps_it_does_not():
    of = {operator: {rule.name: EXAMPLES[rule.name] for rule in rules} for operator, rules in REQUIREMENTS.items()}
    assert sum(map(len, of.values())) == len(EXAMPLES)
    for operator, rules in REQUIREMENTS.items():
        check_refusals(rules, of[operator], partial(call, operator))


def test_arguments_are_parsed_as_on_the_device():
    with pytest.raises(RuntimeError, match="eps"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 2), torch.ones(2), eps=1e-5)
    with pytest.raises(NotEmulatedError, match="'half'"):
        torch.ops.npu.npu_rotary_mul(**make_call("npu_rotary_mul", rotary_mode="interleave"))


# -- arithmetic


def test_each_is_its_formula_by_hand():
    norm, inverse = torch.ops.npu.npu_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    rms = math.sqrt(12.5)
    assert norm.tolist()[0] == pytest.approx([3 / rms, 8 / rms]) and inverse.item() == pytest.approx(1 / rms)
    gated = torch.ops.npu.npu_swiglu(torch.tensor([[1.0, -2.0, 3.0, 5.0]]))
    assert gated.tolist()[0] == pytest.approx([3 / (1 + math.exp(-1)), -10 / (1 + math.exp(2))])
    cos, sin = (torch.tensor([a, b, a, b]).view(1, 1, 1, 4) for a, b in ((0.8, 0.0), (0.6, 1.0)))
    turned = torch.ops.npu.npu_rotary_mul(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4), cos, sin)
    assert turned.flatten().tolist() == pytest.approx([0.8 - 1.8, -4.0, 2.4 + 0.6, 2.0])


def differ(function, plain, inputs: list[torch.Tensor]) -> float:
    """Return the largest difference of outputs and gradients, as a share of the largest of each."""
    results = []
    for each in (function, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = each(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
        results.append([out, *(leaf.grad for leaf in leaves)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (BF16, 2**-7)], ids=["fp32", "bf16"])
def test_norm_and_swiglu_are_the_plain_ones_to_rounding(dtype, limit):
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((7, 2, 16), (16,)))
    norm = lambda x, weight: torch.ops.npu.npu_rms_norm(x, weight, epsilon=1e-5)[0]  # noqa: E731
    assert differ(norm, lambda x, weight: F.rms_norm(x, (16,), weight, 1e-5), [x, weight]) <= limit
    silu = lambda x: F.silu(x[..., :8]) * x[..., 8:]  # noqa: E731
    assert differ(torch.ops.npu.npu_swiglu, silu, [x]) <= limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (BF16, 2**-7)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "is_fused"),
    [
        ((6, 2, 3, 8), True),
        ((6, 3, 8), True),
        ((2, MAX_ROTATED_AXIS + 1, 1, 2), False),
        ((2, 1, MAX_ROTATED_HEAD + 2), False),
    ],
    ids=["rows", "pack", "too many rows", "too wide a head"],
)
def test_rotation_is_the_plain_one_and_leaves_to_that_what_the_operator_does_not_take(
    monkeypatch, shape, is_fused, dtype, limit
):
    from hardware.megatron.layers import rotate
    from hardware.npu import layers

    angle = torch.rand(*shape[:-2], 1, shape[-1] // 2).repeat_interleave(2, dim=-1)
    x, rotary = torch.randn(shape).to(dtype), (angle.cos().to(dtype), angle.sin().to(dtype))
    plain = []
    monkeypatch.setattr(layers, "rotate", lambda *args: plain.append(args) or rotate(*args))
    fused, own = (lambda x, turn=turn: turn(x, rotary) for turn in (layers.rotate_fused, rotate))
    assert torch.equal(fused(x), own(x)) and bool(plain) != is_fused
    assert differ(fused, own, [x]) <= limit


# -- where they are taken


@pytest.mark.parametrize(
    ("change", "is_fused"),
    [
        ({}, True),
        ({"activation_func": F.gelu}, False),
        ({"activation_func_clamp_value": 7.0}, False),
        ({"glu_linear_offset": 1.0}, False),
        ({"add_bias_linear": True}, False),
        ({"gated_linear_unit": False}, False),
    ],
)
def test_the_fused_mlp_is_for_swiglu_and_nothing_beside_it(change, is_fused):
    from hardware.npu.layers import NpuSwigluMLP, find_mlp

    plain = dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False)
    plain |= dict(activation_func_clamp_value=None, glu_linear_offset=0.0)
    assert (find_mlp(SimpleNamespace(**plain | change)) is NpuSwigluMLP) == is_fused
