"""The dense oracle: a micro-batch's mask as a table of pairs, with which tests and probes compare every lowering."""

import numpy as np
import torch
from torch import Tensor

from hardware.attention.mask_spec import MaskSpec


def compute_visible(spec: MaskSpec, layer_number: int = 1) -> Tensor:
    """Compute the dense mask ``[b, s, cp * s]``: True where this rank's query slot may see a key slot.

    Keys are in rank order, as a gather over the context-parallel group delivers them. A padding slot sees nothing
    and is seen by nothing. The size is quadratic in the micro-batch: use it in tests and probes, never in training.
    For a backend with another convention use ``to_blocking_mask`` or ``to_additive_mask``.
    """
    rule = spec.get_rule(layer_number)
    ranks = [[x.numpy() for x in list_slots(spec, rank)] for rank in range(spec.cp)]
    (segment, query), (key_segment, key) = ranks[spec.cp_rank], (np.concatenate(x, axis=1) for x in zip(*ranks))
    image, key_image = spec.find_images(segment, query), spec.find_images(key_segment, key)
    prefix = np.zeros(len(spec.lengths), np.int64) if spec.prefixes is None else np.asarray(spec.prefixes)
    inside, key_inside = query < prefix[segment], key < prefix[key_segment]
    query, key = query[:, :, None], key[:, None, :]
    see = rule.allows(
        query - key,
        (image[:, :, None] == key_image[:, None, :]) & (image[:, :, None] >= 0),
        inside[:, :, None] & key_inside[:, None, :],
        query,
        key,
    )
    real = (segment[:, :, None] >= 0) & (key_segment[:, None, :] >= 0)
    # Of a query's sequence the key at a place is the one in the slots that hold that place.
    same = real & (spec.find_holders(segment[:, :, None], key) == key_segment[:, None, :])
    return torch.from_numpy(see & same)


def list_slots(spec: MaskSpec, cp_rank: int) -> tuple[Tensor, Tensor]:
    """Return ``(segment, position)`` of a rank's slots, both ``[b, s]``; the segment of a padding slot is -1."""
    sequence, position = spec.locate_slots(cp_rank)
    segment = np.where(position < np.asarray(spec.lengths, dtype=np.int64)[sequence], sequence, -1)
    rows = len(spec.padded) if spec.kind == "bshd" else 1
    return torch.from_numpy(segment.reshape(rows, -1)), torch.from_numpy(position.reshape(rows, -1))


def to_blocking_mask(visible: Tensor) -> Tensor:
    """Turn a mask in which True keeps into one in which True *blocks*.

    TransformerEngine (since its pull request 818), Megatron's local attention and ``npu_fusion_attention`` take such
    masks. A row that sees nothing, which only padding has, is opened to every key: those backends would otherwise
    divide by zero, or average over the row in silence.
    """
    return ~(visible | ~visible.any(-1, keepdim=True))


def to_additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask in which True keeps into one that is *added* to the scores: 0 where visible, else the least number of
    ``dtype``.

    HuggingFace's eager attention and TransformerEngine's ``post_scale_bias`` take such masks. The least finite number
    is used and not -inf, so that a row that sees nothing gives finite numbers.
    """
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
