"""Wrong masks for the self-test, written once for all platforms.

A platform names the places where its code lowers a rule; the change at each place is the same for all platforms.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import numpy as np

from hardware.attention.cell import Patch
from hardware.attention.mask_spec import Sharing, expand_counts

Place = tuple[object, str]
"""``(owner, attribute)`` of a function: a module and the function's name, or a class and the method's name."""


def build_attention_faults(
    *,
    packs: Iterable[Place],
    without_mask: Iterable[Patch],
    dense_masks: Iterable[Place] = (),
    calls: Iterable[Place] = (),
    rule_calls: Iterable[Place] = (),
    inverted: Iterable[Patch] = (),
    from_first_key: Iterable[Patch] = (),
) -> dict[str, list[Patch]]:
    """Return name of a fault -> patches that plant it into a platform.

    A fault without a place gets no patches, which ``engines.probes.faults.collect_faults`` refuses.

    Args:
        packs: functions ``(spec, ...)`` that plan a pack over one rank, from its lengths.
        without_mask: patches after which a causal call gets no mask, so that every token sees every token.
        dense_masks: functions ``(spec, rule, ...) -> bool tensor or None``, True where a query sees a key.
        calls: functions ``(spec, rule, ...)`` that pass a rule of a batch to a kernel without a dense mask.
        rule_calls: functions ``(rule, ...)`` that pass a rule alone to a kernel without a dense mask.
        inverted: patches that invert the visible keys of a kernel without dense masks.
        from_first_key: patches that align the causal mask of a sequence's own tokens with the first key and not the
            last, if the sequence shares the tokens before them.
    """
    lowerings = [*dense_masks, *calls]

    def patch_all(places: Iterable[Place], wrap: Callable) -> list[Patch]:
        return [(*place, wrap) for place in places]

    def change_rule(change: Callable) -> list[Patch]:
        masks = patch_all(lowerings, lambda lower: lambda spec, rule, *args: lower(spec, change(rule), *args))
        return masks + patch_all(rule_calls, lambda call: lambda rule, *args: call(change(rule), *args))

    return {
        "whole-buffer causal": patch_all(packs, _changing_spec(_one_sequence)),
        "boundaries off by one": patch_all(packs, _changing_spec(_second_boundary_moved)),
        "inverted polarity": patch_all(dense_masks, _inverted) + list(inverted),
        "None where None means full": list(without_mask),
        "window off by one": change_rule(lambda rule: replace(rule, window=rule.window and rule.window + 1)),
        "an image cut at the window": patch_all(
            lowerings, lambda lower: lambda spec, rule, *args: lower(_images_cut_at_the_window(spec, rule), rule, *args)
        ),
        "causal where the image rule was asked": change_rule(lambda rule: replace(rule, images=False)),
        "padding seen": patch_all(lowerings, _open_to_padding),
        **{name: patch_all(packs, _changing_spec(change)) for name, change in _SHARED_WRONGLY.items()},
        "own tokens from the first key on": list(from_first_key),
    }


def _changing_spec(change: Callable) -> Callable:
    return lambda plan: lambda spec, *args: plan(change(spec), *args)


def _take_own(spec):
    """Leave of sequences that begin alike each one's own tokens, as if they were whole sequences."""
    if not spec.sharing:
        return spec
    owner, within = expand_counts(np.asarray(spec.lengths))
    block, begins = spec.image_block, spec.begins
    return replace(
        spec,
        lengths=tuple((spec.lengths - begins).tolist()),
        image_block=None if block is None else block[within >= begins[owner]],
        prefixes=None if spec.prefixes is None else tuple(np.maximum(spec.prefixes - begins, 0).tolist()),
        sharing=None,
    )


def _one_sequence(spec):
    spec = _take_own(spec)
    prefixes = None if spec.prefixes is None else spec.prefixes[:1]
    block = spec.image_block
    if block is not None:  # two sequences may number their images equally: they stay two images
        sequence = np.repeat(np.arange(len(spec.lengths)), spec.lengths)
        block = np.where(block < 0, -1, block + sequence * (len(block) + 1))
    total = (sum(spec.lengths),), (sum(spec.padded),)
    return replace(spec, lengths=total[0], padded=total[1], prefixes=prefixes, image_block=block)


def _second_boundary_moved(spec):
    """The first sequence takes a slot more; the third gives it, since the second may have a single one."""
    spec = _take_own(spec)
    lengths, padded = list(spec.lengths), list(spec.padded)
    for sizes in (lengths, padded):
        sizes[0], sizes[2] = sizes[0] + 1, sizes[2] - 1
    return replace(spec, lengths=tuple(lengths), padded=tuple(padded))


def _images_cut_at_the_window(spec, rule):
    """Let the window limit the future too: in an image longer than the window, first tokens do not see the last."""
    if spec.image_block is None or rule.window is None:
        return spec
    block, begins = np.asarray(spec.image_block), np.zeros(len(spec.image_block), dtype=bool)
    begins[np.cumsum((0, *spec.lengths[:-1]))[np.asarray(spec.lengths) > 0]] = True
    begins[1:] |= block[1:] != block[:-1]
    place = np.arange(len(block)) - np.maximum.accumulate(np.where(begins, np.arange(len(block)), 0))  # within a run
    cut = block * (len(block) + 1) + place // rule.window  # a part of an image has a number of its own
    return replace(spec, image_block=np.where(block < 0, -1, cut))


def _inverted(mask: Callable) -> Callable:
    def inverted(*args):
        if (keep := mask(*args)) is None:
            return None
        return ~keep | keep.all(-1, keepdim=True)  # a query that sees nothing sees everything, as on a device

    return inverted


def _open_to_padding(lower: Callable) -> Callable:
    def open_to_padding(spec, rule, *args):
        full = spec if rule.causal else replace(spec, lengths=spec.padded, image_block=None)
        return lower(full, rule, *args)

    return open_to_padding


def _share_otherwise(whose: Callable, more: int = 0) -> Callable:
    """Let one sequence have the first of its tokens from another owner, and ``more`` of them; its own stay. For rules
    that ask for neither images nor prefixes.

    Args:
        whose: ``whose(sharing, number, other)`` tells whether sequence ``number`` is to have them from ``other``.
    """

    def change(spec):
        if not (sharing := spec.sharing):
            return spec
        owners, counts, lengths = (list(x) for x in (sharing.owners, sharing.counts, spec.lengths))
        for number, other in product(range(len(lengths)), repeat=2):
            count = counts[number] + more
            reads = number not in owners and counts[number] < lengths[number]  # and nobody reads it
            if reads and whose(sharing, number, other) and counts[other] < count <= lengths[other]:
                owners[number], counts[number], lengths[number] = other, count, lengths[number] + more
                changed = replace(spec, image_block=None, prefixes=None)
                return replace(changed, lengths=tuple(lengths), sharing=Sharing(tuple(owners), tuple(counts)))
        return spec

    return change


def _is_owner(sharing: Sharing, number: int, other: int) -> bool:
    return other == sharing.owners[number]


_SHARED_WRONGLY = {
    "the prompt of another group": _share_otherwise(
        lambda sharing, number, other: not sharing.counts[other] and other != sharing.owners[number]
    ),
    "the last key of a prompt missing": _share_otherwise(_is_owner, -1),
    "a token of the owner's answer seen": _share_otherwise(_is_owner, 1),
    "siblings see each other": _share_otherwise(
        lambda sharing, number, other: (
            other != number and sharing.counts[other] and sharing.owners[other] == sharing.owners[number]
        ),
        1,
    ),
}
SHARING_FAULTS = (*_SHARED_WRONGLY, "own tokens from the first key on")
"""Names of the faults that show only where sequences share slots."""
ATTENTION_FAULTS = tuple(build_attention_faults(packs=(), without_mask=()))
"""Names of the faults that every platform must be able to plant."""
