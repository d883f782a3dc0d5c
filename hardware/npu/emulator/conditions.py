"""The conditions of ``contract.py``: each function tells whether a call of ``npu_fusion_attention`` keeps one."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hardware.npu.kernel_call import TRIANGLE, Call, build_triangle

_PROVEN_TRIANGLES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Compressed masks that have been checked, with the version of their contents."""


def is_triangle(mask: Tensor) -> bool:
    if _PROVEN_TRIANGLES.get(mask) == mask._version:
        return True
    right = torch.equal(mask.reshape(-1, TRIANGLE, TRIANGLE)[0].bool(), build_triangle(mask.device))
    if right:
        _PROVEN_TRIANGLES[mask] = mask._version
    return right


def lengths_are_cumulative(call: Call) -> bool:
    """Tell whether lengths of queries and keys are cumulative, with the same sequences left out at the end."""
    lists = (call.actual_seq_qlen, call.actual_seq_kvlen)
    ends = [next((i for i, end in enumerate(reversed(each)) if end), len(each)) for each in lists]
    totals = (len(call.query), len(call.key))
    return ends[0] == ends[1] and all(are_cumulative(each, total) for each, total in zip(lists, totals))


def list_mask_shapes(call: Call) -> set[tuple[int, ...]]:
    queries, keys = max(call.query_lengths), max(call.key_lengths)
    if call.packed:
        return {(queries, keys), (sum(call.query_lengths), sum(call.key_lengths))}
    batch = len(call.query_lengths)
    each = {(batch, 1, queries, keys), (batch, call.head_num, queries, keys)}
    return each | {(1, 1, queries, keys), (queries, keys)}


def are_cumulative(lengths: list[int], total: int) -> bool:
    """Tell whether ``lengths`` are sums that never fall, up to ``total``, except for zeros at the end."""
    ends = list(lengths)
    while ends and ends[-1] == 0:
        ends.pop()
    return bool(ends) and ends[0] >= 0 and all(a <= b for a, b in zip(ends, ends[1:])) and ends[-1] == total


def every_row_sees_a_key(call: Call) -> bool:
    if call.packed and any(queries and not keys for queries, keys in zip(call.query_lengths, call.key_lengths)):
        return False
    if call.atten_mask is None or (call.inner_precise == 2 and not call.packed):
        return True
    if call.sparse_mode in (2, 3) and all(a <= b for a, b in zip(call.query_lengths, call.key_lengths)):
        return True
    if call.sparse_mode == 3 and not call.packed:
        return True  # more queries than keys: the operator finds the rows without a key by itself
    return all(bool(call.compute_allowed(members[0]).any(-1).all()) for members in call.list_groups().values())


def band_is_not_empty(call: Call) -> bool:
    if call.sparse_mode != 4:
        return True
    pairs = zip(call.query_lengths, call.key_lengths)
    return all(
        -call.pre_tockens <= call.next_tockens and call.next_tockens > -keys and call.pre_tockens > -queries
        for queries, keys in pairs
        if queries
    )


def sizes_are_alike(call: Call) -> bool:
    """Tell whether keys and values have the same tokens and heads, in as many sequences as the queries."""
    tokens = call.key.shape[:-1] == call.value.shape[:-1]
    if call.packed:
        return tokens
    batch = call.input_layout.index("B")
    return tokens and call.query.shape[batch] == call.key.shape[batch]


def dims_are_alike(call: Call) -> bool:
    """Tell whether heads of queries and keys have the same size, and those of values are no larger."""
    if "H" in call.input_layout:
        key, value = call.key.shape[-1], call.value.shape[-1]
        return key % call.head_dim == 0 and key > 0 and value % (key // call.head_dim) == 0 and value <= key
    return call.key.shape[-1] == call.head_dim >= call.value.shape[-1]


def has_compressed_shape(call: Call) -> bool:
    if call.atten_mask is None or not call.compressed:
        return True
    shape = tuple(call.atten_mask.shape)
    if shape[-2:] != (TRIANGLE, TRIANGLE) or any(size != 1 for size in shape[:-2]):
        return False
    return len(shape) == 2 or (len(shape) == 4 and not call.packed)
