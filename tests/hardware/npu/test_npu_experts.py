"""``npu_grouped_matmul``: its contract, and that experts multiplied by it have the values and gradients of a loop."""

import pytest
import torch
from support.attention import check_refusals, refused_for

from hardware.attention.contract import NotEmulatedError
from hardware.npu.emulator.grouped_matmul import REQUIREMENTS
from hardware.npu.emulator.operator import install
from hardware.npu.limits import MAX_GROUPED_WIDTH, MAX_GROUPS

BF16 = torch.bfloat16
ROWS, IN, OUT, COUNT = 6, 4, 3, 2


@pytest.fixture(scope="module", autouse=True)
def operators():
    install()


def call(**changes) -> torch.Tensor:
    """Call the operator, of six rows and two experts unless something is changed."""
    generator = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(ROWS, IN, generator=generator),
        "weight": torch.randn(COUNT, IN, OUT, generator=generator),
        "group_list": torch.tensor([2, 6]),
        "split_item": 3,
        "group_type": 0,
    } | changes
    given |= {name: [given[name]] for name in ("x", "weight") if isinstance(given[name], torch.Tensor)}
    (found,) = torch.ops.npu.npu_grouped_matmul(given.pop("x"), given.pop("weight"), **given)
    return found


BY_COLUMNS = dict(x=torch.ones(ROWS, IN).T, weight=torch.ones(ROWS, OUT), group_type=2)
EXAMPLES = {
    "group_type": (dict(group_type=None), BY_COLUMNS),
    "split_item": (dict(split_item=0), dict(split_item=2)),
    "group_list": (dict(group_list=torch.tensor([2, 6]).int()), {}),
    "dtype": (
        dict(x=torch.ones(ROWS, IN, dtype=BF16)),
        dict(x=torch.ones(ROWS, IN, dtype=BF16), weight=torch.ones(COUNT, IN, OUT, dtype=BF16)),
    ),
    "rank": (dict(weight=torch.ones(IN, OUT)), BY_COLUMNS),
    "sizes": (dict(group_list=torch.tensor([2, 4, 6])), BY_COLUMNS | dict(group_list=torch.tensor([2, 4, 6]))),
    "most groups": tuple(
        dict(weight=torch.ones(count, IN, OUT), group_list=torch.full((count,), ROWS))
        for count in (MAX_GROUPS + 1, MAX_GROUPS)
    ),
    "layout": (BY_COLUMNS | dict(x=torch.ones(IN, ROWS)), BY_COLUMNS),
    "widths": tuple(
        BY_COLUMNS | dict(x=torch.ones(ROWS, width).T) for width in (MAX_GROUPED_WIDTH + 1, MAX_GROUPED_WIDTH)
    ),
    "something to multiply": (
        dict(x=torch.ones(0, IN), group_list=torch.tensor([0, 0])),
        dict(group_list=torch.tensor([0, 6])),
    ),
    "ends": (dict(group_list=torch.tensor([2, 4])), dict(group_list=torch.tensor([6, 6]))),
    "derivative": (dict(x=torch.ones(ROWS, IN, requires_grad=True)), {}),
}


def test_a_call_that_breaks_a_requirement_raises_and_one_that_keeps_it_does_not():
    check_refusals(REQUIREMENTS, EXAMPLES, call)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(weight=torch.ones(COUNT, OUT, IN).transpose(1, 2)[:, :2]), "sizes"),
        (BY_COLUMNS | dict(weight=torch.ones(OUT, ROWS).T), "layout"),
        (dict(x=torch.ones(IN, ROWS).T), "layout"),
        (dict(weight=torch.ones(COUNT, IN, MAX_GROUPED_WIDTH + 1)), "widths"),
        (dict(group_list=torch.tensor([7, 6])), "ends"),
        (dict(group_list=torch.tensor([2, 8])), "ends"),
        (dict(weight=torch.ones(COUNT, IN, OUT, requires_grad=True)), "derivative"),
    ],
)
def test_further_calls_that_break_a_requirement(changes, name):
    with refused_for(next(requirement for requirement in REQUIREMENTS if requirement.name == name)):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(weight=[torch.ones(IN, OUT)] * COUNT), "weight"),
        (dict(group_type=-1), "group_type -1"),
        (dict(group_list_type=1), "group_list_type"),
        (dict(bias=[torch.ones(COUNT, OUT)]), "bias"),
    ],
)
def test_what_is_not_computed_raises(changes, name):
    with pytest.raises(NotEmulatedError, match=f"{name}.* is not computed"):
        call(**changes)


def test_arguments_are_parsed_as_on_the_device():
    with pytest.raises(RuntimeError, match="groups"):
        call(groups=2)


# -- arithmetic


def test_ends_say_whose_rows_are_whose():
    """The example of CANN's page: of nine experts the first has 123 rows, the third and the sixth 333 each."""
    ends = torch.tensor([123, 123, 456, 456, 456, 789, 789, 789, 789])
    x, numbers = torch.ones(789, 1), torch.arange(1.0, 10.0)
    found = call(x=x, weight=numbers.view(9, 1, 1).expand(9, 1, 2), group_list=ends)
    assert found.tolist() == [[1.0] * 2] * 123 + [[3.0] * 2] * 333 + [[6.0] * 2] * 333
    found = call(x=x.expand(789, 4).contiguous().T, weight=x.expand(789, 2), group_list=ends, group_type=2)
    assert found.shape == (9, 4, 2) and [part.unique().tolist() for part in found] == [
        [float(rows)] for rows in (123, 0, 333, 0, 0, 333, 0, 0, 0)
    ]


def multiply_by_loop(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([rows @ each.T for rows, each in zip(x.split(counts), weight, strict=True)])


def differ(counts: list[int], dtype: torch.dtype, make_seed) -> list[float]:
    """Return the largest differences of output and gradients from a loop in fp64, as shares of its largest numbers."""
    from hardware.npu.experts import NpuGroupedExperts

    generator = torch.Generator().manual_seed(1)
    shapes = (sum(counts), 16), (len(counts), 24, 16)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    ends, results = torch.tensor(counts).cumsum(0).int(), []
    for leaves, compute in (
        (drawn, lambda x, weight: NpuGroupedExperts.multiply(x, weight, ends)),
        ([each.double() for each in drawn], lambda x, weight: multiply_by_loop(x, weight, counts)),
    ):
        leaves = [each.requires_grad_() for each in leaves]
        out = compute(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, make_seed(out).to(out.dtype))])
    assert all(got.shape == want.shape and got.dtype == dtype for got, want in zip(*results, strict=True))
    idle = torch.tensor(counts) == 0
    assert (results[0][2][idle] == 0).all(), "an expert without a row has the gradient 0"
    return [
        float((got - want).abs().max() / want.abs().max().clamp(min=1e-9)) if want.numel() else 0.0
        for got, want in zip(*results, strict=True)
    ]


COUNTS = ([3, 0, 5, 1], [0, 0, 4], [0, 1], [7], [0, 0, 0])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (BF16, 2**-8)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values_and_gradients_are_those_of_a_loop_over_experts(counts, dtype, limit):
    """Some experts without a row, a row alone, one expert, none with a row; a gradient as it comes, and expanded."""
    assert max(differ(counts, dtype, lambda out: torch.linspace(-1, 1, out.numel()).view(out.shape))) <= limit
    if sum(counts):  # torch, which gets none, refuses a gradient that is expanded
        assert max(differ(counts, dtype, torch.ones(1, 1).expand_as)) <= limit


@pytest.mark.parametrize(
    ("counts", "shape", "is_plain"),
    [
        ([2, 1], (8, 4), False),
        ([0, 0], (8, 4), True),
        ([3] + [0] * (MAX_GROUPS - 1), (4, 4), False),
        ([3] + [0] * MAX_GROUPS, (4, 4), True),
        ([2, 1], (4, MAX_GROUPED_WIDTH - 3), False),
        ([2, 1], (4, MAX_GROUPED_WIDTH + 1), True),
        ([2, 1], (MAX_GROUPED_WIDTH + 1, 4), True),
    ],
    ids=["small", "no rows", "1024 experts", "1025 experts", "wide", "too wide", "too wide outside"],
)
def test_torch_gets_what_the_operator_does_not_take(monkeypatch, counts, shape, is_plain):
    from hardware.megatron.experts import GroupedExperts
    from hardware.npu.experts import NpuGroupedExperts

    plain, multiply = [], GroupedExperts.multiply
    monkeypatch.setattr(
        GroupedExperts, "multiply", staticmethod(lambda *given: plain.append(given) or multiply(*given))
    )
    x = torch.randn(sum(counts), shape[1], requires_grad=True)
    weight = torch.randn(len(counts), *shape, requires_grad=True)
    found = NpuGroupedExperts.multiply(x, weight, torch.tensor(counts).cumsum(0).int())
    want = multiply_by_loop(x, weight, counts)
    (found * torch.rand_like(found)).sum().backward()
    assert bool(plain) == is_plain and found.shape == want.shape and weight.grad.isfinite().all()
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1], ids=["rows", "weights"])
def test_of_what_is_frozen_no_gradient_is_computed(monkeypatch, frozen):
    from hardware.npu import experts

    kinds, multiply = [], experts._multiply
    monkeypatch.setattr(
        experts, "_multiply", lambda *given, group_type: kinds.append(group_type) or multiply(*given, group_type)
    )
    leaves = [torch.randn(3, 4, requires_grad=frozen != 0), torch.randn(2, 8, 4, requires_grad=frozen != 1)]
    experts.NpuGroupedExperts.multiply(*leaves, torch.tensor([1, 3]).int()).sum().backward()
    assert kinds == [0, [2, 0][frozen]] and leaves[frozen].grad is None
