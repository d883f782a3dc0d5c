import numpy as np
import pytest
import torch

from hardware.attention.dense.oracle import compute_visible, list_slots, to_additive_mask, to_blocking_mask
from hardware.attention.mask_spec import (
    MaskSpec,
    list_zigzag_positions,
    locate_slots,
)
from hardware.attention.rules import CAUSAL, Rule, count_tokens_before


def test_zigzag_pairs_a_low_chunk_with_a_high_one():
    assert list_zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert list_zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_slot_places_cover_every_position_of_every_sequence_once(cp):
    padded = (8 * cp, 2 * cp, 0, 4 * cp)
    seen = [pair for rank in range(cp) for pair in zip(*(x.tolist() for x in locate_slots(padded, cp, rank)))]
    assert sorted(seen) == [(i, p) for i, size in enumerate(padded) for p in range(size)]


@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_oracle_says_what_the_rule_says_in_words(kind, cp):
    lengths, window = (3, 5, 1), 2
    padded = (8, 8, 8) if kind == "bshd" else (4, 8, 4)
    for rank in range(cp):
        spec = MaskSpec(kind, lengths, padded, cp, rank, rules=(CAUSAL, Rule(window=window)))
        segment, position = list_slots(spec, rank)
        keys = [list_slots(spec, r) for r in range(cp)]
        key_segment, key_position = (torch.cat([k[i] for k in keys], 1) for i in range(2))
        for layer, reach in ((1, 10**6), (2, window)):
            see = compute_visible(spec, layer)
            for b in range(see.shape[0]):
                for i in range(see.shape[1]):
                    for j in range(see.shape[2]):
                        q, k = int(segment[b, i]), int(key_segment[b, j])
                        back = int(position[b, i]) - int(key_position[b, j])
                        assert bool(see[b, i, j]) == (q >= 0 and q == k and 0 <= back < reach)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kind="thd", lengths=(3, 2), padded=(4,)), "2 lengths but 1 padded"),
        (dict(kind="thd", lengths=(5,), padded=(4,)), "longer than its padded length"),
        (dict(kind="bshd", lengths=(3, 2), padded=(4, 2)), "padded to one length"),
        (dict(kind="thd", lengths=(3,), padded=(6,), cp=2), "multiples of 2\\*cp = 4"),
        (dict(kind="thd", lengths=(3,), padded=(3,), rules=()), "at least one rule"),
        (dict(kind="thd", lengths=(3,), padded=(3,), rules=(Rule(images=True),)), "which numbers them, is None"),
        (dict(kind="thd", lengths=(3,), padded=(3,), image_block=np.zeros(2, int)), "2 entries for 3 tokens"),
        (dict(kind="thd", lengths=(3,), padded=(3,), rules=(Rule(prefix=True),)), "does not say how long"),
        (dict(kind="thd", lengths=(3,), padded=(3,), prefixes=(1, 2)), "2 prefixes for 1 sequences"),
        (dict(kind="thd", lengths=(3,), padded=(4,), prefixes=(4,)), "are longer than their sequences"),
    ],
)
def test_impossible_specs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MaskSpec(**arguments)


def test_rules_are_those_of_transformers():
    """Against the mask functions that transformers builds its models' masks from, for every pair of 12 positions."""
    from transformers import masking_utils as theirs
    from transformers.models.gemma3 import modeling_gemma3

    # 5.5 has the rule of images in Gemma 3 alone.
    see_blocks = getattr(theirs, "blockwise_overlay", None) or modeling_gemma3.token_type_ids_mask_function
    length = 12
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 2, 2, -1, -1]])
    causal, window = theirs.causal_mask_function, theirs.sliding_window_overlay(3)
    images, prefix = see_blocks(blocks), see_blocks(torch.tensor([[0] * 5 + [-1] * 7]))
    functions = {
        Rule(): causal,
        Rule(window=3): theirs.sliding_window_causal_mask_function(3),
        Rule(chunk=4): theirs.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        # Gemma 3: global layers, and local ones. PaliGemma: its prefix.
        Rule(images=True): theirs.or_masks(causal, images),
        Rule(images=True, window=3): theirs.and_masks(window, theirs.or_masks(causal, images)),
        Rule(prefix=True): theirs.or_masks(causal, prefix),
        Rule(causal=False): theirs.bidirectional_mask_function,
    }
    places = torch.arange(length)
    for rule, function in functions.items():
        spec = MaskSpec("thd", (length,), (length,), rules=(rule,), image_block=blocks[0].numpy(), prefixes=(5,))
        want = torch.tensor([[bool(function(0, 0, q, k)) for k in places] for q in places])
        assert torch.equal(compute_visible(spec)[0], want), rule


def test_a_state_hears_the_past_of_its_sequence():
    for kind, cp in (("bshd", 1), ("thd", 1), ("bshd", 2), ("thd", 2)):
        for rank in range(cp):
            spec = MaskSpec(kind, (5, 3), (8, 8), cp, rank, rules=(Rule(state=True), CAUSAL))
            assert torch.equal(compute_visible(spec, 1), compute_visible(spec, 2)) and spec.attended == {CAUSAL}


def test_an_image_of_another_sequence_is_another_image():
    spec = MaskSpec("thd", (2, 2), (2, 2), rules=(Rule(images=True),), image_block=np.zeros(4, int))
    assert compute_visible(spec)[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_the_two_ways_out_of_a_keep_mask():
    see = torch.tensor([[True, False], [False, False]])
    assert to_blocking_mask(see).tolist() == [[False, True], [False, False]], "a row without any key is opened"
    least = torch.finfo(torch.float32).min
    assert to_additive_mask(see, torch.float32).tolist() == [[0.0, least], [least, least]]


def test_windows_of_other_conventions():
    assert [count_tokens_before(window) for window in (1, 4, None)] == [0, 3, -1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(window=0), "window counts the token itself and so is at least 1, got 0"),
        (dict(chunk=-1), "chunk counts the token itself"),
        (dict(causal=False, window=2, images=True), "window and images need causal=True"),
        (dict(causal=False, state=True), "state need causal=True"),
        (dict(state=True, window=4), "window and state do not go together: a state hears all of the past"),
    ],
)
def test_impossible_rules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rule(**arguments)
