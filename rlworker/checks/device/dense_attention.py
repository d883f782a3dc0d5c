"""Attention by definition, and packs with images, to compare kernels with."""

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM = 4, 2, 8
"""Number of query heads, of key and value heads, and size of a head: the smallest that a kernel for cards takes."""


def dense_attention(query: Tensor, key: Tensor, value: Tensor, see: Tensor) -> Tensor:
    """Compute attention by definition: softmax over the visible keys. The result is zero for a query that sees no key.

    Args:
        query: ``[b, s, h, d]``. key, value: of the same shape, but with h or fewer heads.
        see: ``[b, q, k]`` bool, True where a query sees a key.

    Returns:
        ``[b, s, h * d]``.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weight = scores.masked_fill(~see[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", weight, value).flatten(2)


def find_image_blocks(lengths: tuple[int, ...]) -> Tensor:
    """Return the number of each token's image, ``[N]``; -1 for text.

    A sequence that is long enough has an image of two tokens near its start; a longer sequence also has an image of
    three tokens at its end.
    """
    blocks = []
    for n in lengths:
        images = [-1] * n
        images[1:3] = [0] * len(images[1:3])
        images[-3:] = [1] * len(images[-3:]) if n > 6 else images[-3:]
        blocks += images
    return torch.tensor(blocks)
