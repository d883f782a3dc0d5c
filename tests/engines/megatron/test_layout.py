"""Layout against a loop over sequences that shares none of its code."""

import math
import random

import pytest
import torch

from engines.megatron.layout import Layout
from hardware.attention.dense.oracle import list_slots
from hardware.attention.rules import compute_slot_unit


def by_hand(lengths, kind, tp, cp, rank, multiple=1, slots=0):
    """Rows of (token, position, sequence) or None for padding, built one sequence at a time."""
    unit = tp if cp == 1 else tp * 2 * cp
    while unit % (multiple * cp):
        unit += tp if cp == 1 else tp * 2 * cp
    sizes = [(n + unit - 1) // unit * unit for n in lengths]
    if kind == "bshd":
        sizes = [slots or max(sizes)] * len(sizes)
    elif slots:
        lengths, sizes = [*lengths, 0], [*sizes, slots - sum(sizes)]
    rows, start = [], 0
    for i, (n, size) in enumerate(zip(lengths, sizes)):
        row = [(start + p, p, i) if p < n else None for p in range(size)]
        if cp > 1:
            chunk = size // (2 * cp)
            low, high = rank * chunk, (2 * cp - 1 - rank) * chunk
            row = row[low : low + chunk] + row[high : high + chunk]
        rows.append(row)
        start += n
    return rows if kind == "bshd" else [[slot for row in rows for slot in row]]


def draw_case(draw: random.Random) -> dict:
    """Any parallel sizes and alignment; sequences empty, of one token, shorter than the chunks, and long ones."""
    size = draw.choice([1, 3, 12, 40])
    lengths = tuple(draw.choice([0, 1, draw.randint(1, size)]) for _ in range(draw.randint(1, 7)))
    tp, cp, multiple = draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 1, 3, 16])
    unit = compute_slot_unit(tp, cp, multiple)
    kind = draw.choice(["bshd", "thd"])
    sizes = [-(-n // unit) * unit for n in lengths]
    need = max(sizes) if kind == "bshd" else sum(sizes)
    slots = draw.choice([0, 0, need, need + unit * draw.randint(1, 3)])
    return dict(lengths=lengths, kind=kind, tp=tp, cp=cp, multiple=multiple, slots=slots)


def check_case(case: dict, trailing: tuple[int, ...]) -> None:
    """Every slot of every rank, both ways, against the loop."""
    lengths, cp = case["lengths"], case["cp"]
    flat = torch.arange(1, 1 + sum(lengths) * math.prod(trailing)).view(sum(lengths), *trailing).float()
    total = torch.zeros_like(flat)
    for rank in range(cp):
        layout = Layout.build(**case, cp_rank=rank)
        want = by_hand(**case, rank=rank)
        assert layout.valid.tolist() == [[slot is not None for slot in row] for row in want]
        segment, position = list_slots(layout.build_mask_spec(), rank)
        assert segment.tolist() == [[slot[2] if slot else -1 for slot in row] for row in want]
        # A pad's position is never read; a real slot's is its place in its own sequence.
        assert (position * layout.valid).tolist() == [[slot[1] if slot else 0 for slot in row] for row in want]
        packed = layout.pack(flat, fill=-7.0)
        assert packed.shape == (*layout.valid.shape, *trailing)
        token = packed.flatten(2)[..., 0] if trailing else packed
        first = flat.flatten(1)[:, 0].tolist() if trailing else flat.tolist()
        assert token.tolist() == [[first[slot[0]] if slot else -7.0 for slot in row] for row in want]
        assert layout.num_valid == sum(slot is not None for row in want for slot in row)
        assert layout.valid.shape[1] % case["tp"] == 0
        total += layout.unpack(packed)
    assert torch.equal(total, flat)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.large) for seed in range(3, 8))])
def test_random_layouts_against_a_loop(seed):
    """8 x 1,300 generated cases of trailing dimensions none, one and two."""
    draw, done = random.Random(seed), 0
    while done < 1300:
        case = draw_case(draw)
        if any(case["lengths"]):
            check_case(case, draw.choice([(), (3,), (2, 3)]))
            done += 1


@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 4])
def test_thousands_of_sequences(kind, cp):
    draw = random.Random(0)
    lengths = tuple(draw.choice([0, 1, draw.randint(1, 12)]) for _ in range(5000))
    slots = 5000 * 16 if kind == "thd" else 32
    check_case(dict(lengths=lengths, kind=kind, tp=2, cp=cp, multiple=1, slots=slots), (2,))


def test_slots_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="2 sequences need 8 slots in units of 2, but slots=6"):
        Layout.build((5, 2), "thd", tp=2, slots=6)
    with pytest.raises(ValueError, match="units of 4, but slots=10"):
        Layout.build((5, 2), "bshd", cp=2, slots=10)


def test_the_documented_example():
    bshd, thd = (Layout.build((3, 1), kind, tp=2) for kind in ("bshd", "thd"))
    flat = torch.tensor([1, 2, 3, 4])
    assert bshd.pack(flat).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]] and bshd.slots.tolist() == [0, 1, 2, 4]
    assert thd.pack(flat).tolist() == [[1, 2, 3, 0, 4, 0]] and thd.slots.tolist() == [0, 1, 2, 4]
    assert thd.padded == (4, 2)


@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_gradients_pass_through_pack_and_unpack(kind, cp):
    lengths = (5, 0, 1, 3)
    flat = torch.randn(9, 2, requires_grad=True)
    weight = torch.randn(9, 2)
    layouts = [Layout.build(lengths, kind, cp=cp, cp_rank=r) for r in range(cp)]
    total = sum(layout.unpack(layout.pack(flat) ** 2) for layout in layouts)
    (gradient,) = torch.autograd.grad((total * weight).sum(), flat)
    assert torch.allclose(gradient, 2 * flat * weight)


def test_padding_gets_no_gradient():
    layout = Layout.build((3, 1), "bshd")
    local = torch.randn(2, 3, requires_grad=True)
    layout.unpack(local).sum().backward()
    assert local.grad.tolist() == layout.valid.float().tolist()


def test_nothing_to_lay_out_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        Layout.build((0, 0), "thd")
