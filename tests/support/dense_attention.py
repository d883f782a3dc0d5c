"""Attention by the book, and who influences whom: what kernels and lowerings are compared with."""

import torch

HEADS, KV_HEADS, DIM = 4, 2, 8


def dense_attention(query, key, value, see):
    """``[b, s, h, d]`` by the book: softmax over what is visible ``[b, q, k]``. Rows that see nothing give zero."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weight = scores.masked_fill(~see[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", weight, value).flatten(2)


def draw_qkv(b, s, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, s, h, DIM, generator=generator, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS)]


def probe_influence(attend, b, s):
    """``[b, s, s]`` bool: does what comes out at place i change with keys and values at place j of the same row?"""
    query, key, value = draw_qkv(b, s)
    out = attend(query, key, value)
    found = torch.zeros(b, s, s, dtype=torch.bool)
    for i in range(s):
        grads = torch.autograd.grad(out[:, i].sum(), (key, value), retain_graph=True)
        found[:, i] = sum(g.abs().flatten(2).sum(-1) for g in grads) > 0
    return found


def find_image_blocks(lengths):
    """An image of two tokens near the start of every sequence that has the room, and one at the end of long ones."""
    blocks = []
    for n in lengths:
        own = [-1] * n
        own[1:3] = [0] * len(own[1:3])
        own[-3:] = [1] * len(own[-3:]) if n > 6 else own[-3:]
        blocks += own
    return torch.tensor(blocks)
