"""Attention by the book, and packs with images: kernels and lowerings are compared with these."""

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM = 4, 2, 8
"""Of queries, of keys and values, and the size of each: the least that a kernel for cards takes."""


def dense_attention(query: Tensor, key: Tensor, value: Tensor, see: Tensor) -> Tensor:
    """Compute attention by the book: softmax over the visible keys. Rows that see nothing give zero.

    Args:
        query: ``[b, s, h, d]``, as ``key`` and ``value``, with as many heads or fewer.
        see: ``[b, q, k]`` bool, the keys that each query sees.

    Returns:
        ``[b, s, h * d]``.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weight = scores.masked_fill(~see[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", weight, value).flatten(2)


def find_image_blocks(lengths: tuple[int, ...]) -> Tensor:
    """Return the image of each token ``[N]``, -1 where it is text.

    Every sequence that has the room has an image of two tokens near its start, long sequences one of three at their
    end.
    """
    blocks = []
    for n in lengths:
        images = [-1] * n
        images[1:3] = [0] * len(images[1:3])
        images[-3:] = [1] * len(images[-3:]) if n > 6 else images[-3:]
        blocks += images
    return torch.tensor(blocks)
