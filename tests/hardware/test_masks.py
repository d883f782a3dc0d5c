import numpy as np
import pytest
import torch

from hardware.masks import MaskSpec, slot_places, zigzag_positions
from hardware.rules import CAUSAL, Rule


def test_zigzag_pairs_a_low_chunk_with_a_high_one():
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_slot_places_cover_every_position_of_every_sequence_once(cp):
    padded = (8 * cp, 2 * cp, 0, 4 * cp)
    seen = [pair for rank in range(cp) for pair in zip(*(x.tolist() for x in slot_places(padded, cp, rank)))]
    assert sorted(seen) == [(i, p) for i, size in enumerate(padded) for p in range(size)]


@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_oracle_says_what_the_rule_says_in_words(kind, cp):
    lengths, window = (3, 5, 1), 2
    padded = (8, 8, 8) if kind == "bshd" else (4, 8, 4)
    for rank in range(cp):
        spec = MaskSpec(kind, lengths, padded, cp, rank, rules=(CAUSAL, Rule(window=window)))
        segment, position = spec.places(rank)
        keys = [spec.places(r) for r in range(cp)]
        key_segment, key_position = (torch.cat([k[i] for k in keys], 1) for i in range(2))
        for layer, reach in ((1, 10**6), (2, window)):
            see = spec.visible(layer)
            for b in range(see.shape[0]):
                for i in range(see.shape[1]):
                    for j in range(see.shape[2]):
                        q, k = int(segment[b, i]), int(key_segment[b, j])
                        back = int(position[b, i]) - int(key_position[b, j])
                        assert bool(see[b, i, j]) == (q >= 0 and q == k and 0 <= back < reach)


def test_window_counts_the_token_itself():
    see = MaskSpec("thd", (5,), (5,), rules=(Rule(window=2),)).visible()[0]
    assert see.sum(1).tolist() == [1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kind="thd", lengths=(3, 2), padded=(4,)), "2 lengths but 1 padded"),
        (dict(kind="thd", lengths=(5,), padded=(4,)), "longer than its padded length"),
        (dict(kind="bshd", lengths=(3, 2), padded=(4, 2)), "padded to one length"),
        (dict(kind="thd", lengths=(3,), padded=(6,), cp=2), "multiples of 2\\*cp = 4"),
        (dict(kind="thd", lengths=(3,), padded=(3,), rules=()), "at least one rule"),
        (dict(kind="thd", lengths=(3,), padded=(3,), rules=(Rule(images=True),)), "does not say where they are"),
        (dict(kind="thd", lengths=(3,), padded=(3,), image_block=np.zeros(2, int)), "2 entries for 3 tokens"),
        (dict(kind="thd", lengths=(3,), padded=(3,), rules=(Rule(prefix=True),)), "does not say how long"),
        (dict(kind="thd", lengths=(3,), padded=(3,), prefixes=(1, 2)), "2 prefixes for 1 sequences"),
    ],
)
def test_impossible_specs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MaskSpec(**arguments)
