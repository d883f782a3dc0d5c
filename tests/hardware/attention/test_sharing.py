"""Sequences that begin alike and share slots: who sees whom is what sequences by themselves say."""

import random

import numpy as np
import pytest
import torch

from engines.megatron.layout import Layout
from hardware.attention.dense.oracle import compute_visible, list_slots
from hardware.attention.grouped_sdpa import _Gather
from hardware.attention.mask_spec import MaskSpec, Sharing
from hardware.attention.rules import CAUSAL, Rule
from rlworker.checks.device.attention import RULES, SHARED, find_holding_tokens
from rlworker.checks.device.dense_attention import find_image_blocks


def draw_pack(draw: random.Random) -> tuple[tuple[int, ...], Sharing]:
    """Draw sequences, each of which begins like an earlier one or like none; owners may have owners."""
    lengths, owners, counts = [], [], []
    for number in range(draw.randint(1, 8)):
        able = [i for i in range(number) if lengths[i] > counts[i]]
        if able and draw.random() < 0.7:
            owners.append(draw.choice(able))
            counts.append(draw.randint(counts[owners[-1]] + 1, lengths[owners[-1]]))
        else:
            owners.append(number)
            counts.append(0)
        lengths.append(counts[-1] + draw.choice([0 if counts[-1] else 1, 1, draw.randint(1, 12)]))
    return tuple(lengths), Sharing(tuple(owners), tuple(counts))


def check_pack(lengths, sharing, rule, tp, cp, slots) -> None:
    """Pull the oracle of shared slots back to the tokens of the stream, and compare it with that of plain sequences."""
    holders = find_holding_tokens(lengths, sharing)
    blocks, prefixes = find_image_blocks(lengths)[holders], tuple(min(1, n) for n in lengths)
    alone = MaskSpec("thd", lengths, lengths, rules=(rule,), image_block=blocks.numpy(), prefixes=prefixes)
    want = compute_visible(alone)[0]  # [N, N]
    layouts = [Layout.build(lengths, "thd", tp=tp, cp=cp, cp_rank=r, slots=slots, sharing=sharing) for r in range(cp)]
    width = layouts[0].shape[1]
    keys = torch.full((len(want),), -1)
    for rank, layout in enumerate(layouts):
        held = torch.arange(len(want)) if layout.tokens is None else layout.tokens
        keys[held] = rank * width + layout.slots
    assert (keys >= 0).all() and (keys == keys[holders]).all(), "each token is on one rank, where its holder is"
    assert len(keys.unique()) == len(holders.unique()), "and others have others' slots"
    for rank, layout in enumerate(layouts):
        seen = compute_visible(layout.build_mask_spec((rule,), blocks, prefixes))[0]
        held = (keys // width) == rank
        assert torch.equal(seen[keys[held] % width][:, keys] & want[held], want[held])
        assert torch.equal(seen[keys[held] % width].sum(1), want[held].sum(1)), "and nothing else"
        assert not seen[~layout.valid[0]].any()
    assert sum(layout.num_valid for layout in layouts) == len(want)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.causal], ids=str)
def test_named_packs(rule):
    for lengths, sharing in SHARED:
        for cp in (1, 2, 4):
            check_pack(lengths, sharing, rule, tp=1, cp=cp, slots=0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.large) for seed in range(1, 6))])
def test_random_packs(seed):
    draw, done = random.Random(seed), 0
    while done < 60:
        lengths, sharing = draw_pack(draw)
        tp, cp, slots = draw.choice([1, 2]), draw.choice([1, 2, 4]), draw.choice([0, 0, 512])
        check_pack(lengths, sharing, draw.choice([CAUSAL, Rule(window=3), Rule(chunk=4)]), tp, cp, slots)
        done += 1


def test_the_documented_example():
    layout = Layout.build((3, 3, 1), "thd", sharing=Sharing((0, 0, 2), (0, 2, 0)))
    assert layout.slots.tolist() == [0, 1, 2, 0, 1, 3, 4] and layout.padded == (3, 1, 1)
    assert list_slots(layout.build_mask_spec(), 0)[1].tolist() == [[0, 1, 2, 2, 0]]


def test_gradients_of_a_shared_slot_add_up():
    layout = Layout.build((3, 3, 1), "thd", sharing=Sharing((0, 0, 2), (0, 2, 0)))
    local = torch.zeros(1, 5, requires_grad=True)
    (layout.unpack(local) * torch.tensor([1.0, 2, 4, 8, 16, 32, 64])).sum().backward()
    assert local.grad.tolist() == [[9.0, 18.0, 4.0, 32.0, 64.0]]


@pytest.mark.parametrize(
    ("sharing", "message"),
    [
        (Sharing((0, 0), (0, 6)), r"sequence 1 has the first 6 of its 7 .* sequence 0, which holds tokens 0\.\.5"),
        (Sharing((1, 0), (2, 2)), "sequence 0 has the first 2 of its 5 tokens from sequence 1, which holds tokens 2"),
        (Sharing((0, 1), (0, 3)), "sequence 1 has the first 3 of its 7 tokens from sequence 1"),
        (Sharing((0,), (0,)), "1 owners and 1 counts of 2 sequences"),
    ],
    ids=["more than the owner has", "a circle", "its own owner", "too few"],
)  # fmt: skip
def test_an_owner_without_the_tokens_is_refused(sharing, message):
    with pytest.raises(ValueError, match=message):
        MaskSpec("thd", (5, 7), (5, 7), sharing=sharing)


def test_rules_under_which_what_is_shared_differs_are_refused():
    both, images = Sharing((0, 0), (0, 3)), np.asarray([-1, -1, 0, 0, -1, -1, -1, 0, -1, -1])
    sizes = ("thd", (5, 5), (5, 2))
    MaskSpec(*sizes, image_block=images, sharing=both)  # nobody sees an image both ways
    with pytest.raises(ValueError, match="sequence 1 shares 3 tokens, which end within an image"):
        MaskSpec(*sizes, rules=(Rule(images=True),), image_block=images, sharing=both)
    with pytest.raises(ValueError, match="sequence 1 shares its first 3 tokens with sequence 0, and a prefix"):
        MaskSpec(*sizes, rules=(Rule(prefix=True),), prefixes=(4, 1), sharing=both)
    with pytest.raises(ValueError, match="a rule sees all that follows"):
        MaskSpec(*sizes, rules=(Rule(causal=False),), sharing=both)
    with pytest.raises(ValueError, match="rows share no slots"):
        MaskSpec("bshd", (5, 5), (5, 5), sharing=both)


def test_gradients_of_gathered_rows_are_those_of_autograd_to_the_last_bit():
    """Groups that share rows: one row in many places, one in none."""
    generator, sizes = torch.Generator().manual_seed(0), [6, 1, 11]
    rows, index = torch.randn(7, 2, 3, generator=generator), torch.randint(0, 6, (18,), generator=generator)
    weights, gradients = torch.randn(18, 2, 3, generator=generator).split(sizes), []
    for gather in (_Gather.apply, lambda x, index, sizes: x.index_select(0, index).split(sizes)):
        x = rows.clone().requires_grad_()
        parts = gather(x, index, sizes)
        assert torch.equal(torch.cat(parts), rows[index])
        torch.autograd.backward(parts, weights)
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0][:6].any() and not gradients[0][6].any()
