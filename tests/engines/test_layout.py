"""Layout against a loop over sequences that shares none of its code."""

import random

import pytest
import torch

from engines.megatron.layout import Layout


def by_hand(lengths, kind, tp, cp, rank):
    """Rows of (token, position, sequence) or None for padding, built one sequence at a time."""
    align = tp if cp == 1 else tp * 2 * cp
    sizes = [(n + align - 1) // align * align for n in lengths]
    if kind == "bshd":
        sizes = [max(sizes)] * len(sizes)
    rows, start = [], 0
    for i, (n, size) in enumerate(zip(lengths, sizes)):
        slots = [(start + p, p, i) if p < n else None for p in range(size)]
        if cp > 1:
            chunk = size // (2 * cp)
            low, high = rank * chunk, (2 * cp - 1 - rank) * chunk
            slots = slots[low : low + chunk] + slots[high : high + chunk]
        rows.append(slots)
        start += n
    return rows if kind == "bshd" else [[slot for row in rows for slot in row]]


@pytest.mark.parametrize("kind", ["bshd", "thd"])
def test_random_layouts_against_a_loop(kind):
    draw = random.Random(0)
    for _ in range(400):
        lengths = tuple(draw.choice([0, 1, draw.randint(1, 40)]) for _ in range(draw.randint(1, 7)))
        if not any(lengths):
            continue
        tp, cp = draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
        flat = torch.randn(sum(lengths), 2, 3)
        total = torch.zeros_like(flat)
        for rank in range(cp):
            layout = Layout.build(lengths, kind, tp=tp, cp=cp, cp_rank=rank)
            want = by_hand(lengths, kind, tp, cp, rank)
            assert layout.valid.tolist() == [[slot is not None for slot in row] for row in want]
            segment, position = layout.places
            assert segment.tolist() == [[slot[2] if slot else -1 for slot in row] for row in want]
            packed = layout.pack(flat, fill=7.0)
            for b, row in enumerate(want):
                for s, slot in enumerate(row):
                    assert torch.equal(packed[b, s], flat[slot[0]] if slot else torch.full((2, 3), 7.0))
                    assert slot is None or position[b, s] == slot[1]
            assert layout.num_valid == sum(slot is not None for row in want for slot in row)
            assert layout.valid.shape[1] % tp == 0
            total += layout.unpack(packed)
        assert torch.equal(total, flat)


def test_the_documented_example():
    bshd, thd = (Layout.build((3, 1), kind, tp=2) for kind in ("bshd", "thd"))
    assert bshd.source.tolist() == [[0, 1, 2, 0], [3, 0, 0, 0]] and bshd.cu_seqlens is None
    assert thd.source.tolist() == [[0, 1, 2, 0, 3, 0]] and thd.places[1].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert thd.cu_seqlens.tolist() == [0, 4, 6] and thd.cu_seqlens.dtype == torch.int32


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
