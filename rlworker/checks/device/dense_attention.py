"""Attention by the book, and who influences whom: kernels and lowerings are compared with these."""

import torch

HEADS, KV_HEADS, DIM = 4, 2, 8


def dense_attention(query, key, value, see):
    """Compute attention by the book: softmax over the visible keys. Rows that see nothing give zero.

    Args:
        query: ``[b, s, h, d]``, as ``key`` and ``value``, whose heads may be fewer.
        see: ``[b, q, k]`` bool, who sees whom.

    Returns:
        ``[b, s, h * d]``.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weight = scores.masked_fill(~see[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", weight, value).flatten(2)


def draw_qkv(b, s, seed=0):
    """Draw query, key and value ``[b, s, heads, DIM]``, which take gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, s, h, DIM, generator=generator, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS)]


def probe_influence(attend, b, s):
    """Return ``[b, s, s]`` bool: the output at place i changes with keys and values at place j of the same row."""
    query, key, value = draw_qkv(b, s)
    out = attend(query, key, value)
    sees = torch.zeros(b, s, s, dtype=torch.bool)
    for i in range(s):
        grads = torch.autograd.grad(out[:, i].sum(), (key, value), retain_graph=True)
        sees[:, i] = sum(g.abs().flatten(2).sum(-1) for g in grads) > 0
    return sees


def find_image_blocks(lengths):
    """Return the image of each token ``[N]``, -1 where it is text.

    Every sequence that has the room has an image of two tokens near its start, long ones one of three at their end.
    """
    blocks = []
    for n in lengths:
        images = [-1] * n
        images[1:3] = [0] * len(images[1:3])
        images[-3:] = [1] * len(images[-3:]) if n > 6 else images[-3:]
        blocks += images
    return torch.tensor(blocks)
