"""The requirements of ``npu_fusion_attention`` in the modes that the NPU platform calls.

They are every documented rule, and every misuse that the operator computes in silence.

Each requirement names its source: the operator's page in the op-plugin documentation; op-plugin's host code,
FlashAttentionKernelNpuOpApi.cpp; the operator's tiling in CANN. A device refuses calls that break requirements of the
host code or the tiling. For requirements of the page alone the device's reaction is unknown. Requirements whose breach
is known to be computed wrongly without an error are ``silent``.
"""

import torch
from torch import Tensor

from hardware.attention.contract import Requirement, Source, check_call
from hardware.npu.emulator.conditions import (
    band_is_not_empty,
    dims_are_alike,
    every_row_sees_a_key,
    has_compressed_shape,
    is_triangle,
    lengths_are_cumulative,
    list_mask_shapes,
    sizes_are_alike,
)
from hardware.npu.kernel_call import LAYOUTS, NO_LIMIT, Call
from hardware.npu.limits import MAX_PACK_SEQUENCES

_D = Source("op-plugin documentation", refuses=False)
_H, _T = Source("op-plugin host code"), Source("CANN tiling")
_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def _tensors(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return call.query, call.key, call.value


_Rule = Requirement[Call]

REQUIREMENTS: tuple[_Rule, ...] = (
    _Rule("head_num", _H, lambda c: c.head_num > 0, lambda c: f"head_num must be above 0, got {c.head_num}"),
    _Rule(
        "rank",
        _H,
        lambda c: all(x.dim() in (3, 4) for x in _tensors(c)),
        lambda c: f"query, key and value have 3 or 4 dimensions, got {[x.dim() for x in _tensors(c)]}",
    ),
    _Rule("keep_prob", _H, lambda c: 0 < c.keep_prob <= 1, lambda c: f"keep_prob is in (0, 1], got {c.keep_prob}"),
    _Rule(
        "input_layout",
        _H,
        lambda c: c.input_layout in LAYOUTS,
        lambda c: (
            f"input_layout is one of {LAYOUTS}, in capitals: the host code looks for TND before it makes them, got "
            f"{c.input_layout!r}"
        ),
    ),
    _Rule(
        "layout rank",
        _T,
        lambda c: all(x.dim() == len(c.input_layout) for x in _tensors(c)),
        lambda c: f"{c.input_layout} has {len(c.input_layout)} dimensions, got {[x.dim() for x in _tensors(c)]}",
    ),
    _Rule(
        "softmax_layout",
        _H,
        lambda c: c.softmax_layout == "" or (c.softmax_layout == "TND" and c.packed),
        lambda c: f"softmax_layout is '', or 'TND' with input_layout TND, got {c.softmax_layout!r}",
    ),
    _Rule(
        "sparse_mode",
        _H,
        lambda c: c.sparse_mode in ((0, 1, 2, 3, 4, 6, 7, 8) if c.packed else range(7)),
        lambda c: f"sparse_mode is 0 to 6, in TND 0 to 4 or 6 to 8, got {c.sparse_mode}",
    ),
    _Rule(
        "lengths given",
        _H,
        lambda c: not c.packed or len(c.actual_seq_qlen or ()) == len(c.actual_seq_kvlen or ()) > 0,
        lambda c: "TND needs actual_seq_qlen and actual_seq_kvlen, equally many",
    ),
    _Rule(
        "lengths unasked",
        _H,
        lambda c: c.packed or not (c.actual_seq_qlen or c.actual_seq_kvlen),
        lambda c: f"lengths were given with {c.input_layout}, which then runs the kernel of packs on rows",
        silent=True,
    ),
    _Rule(
        "dtype",
        _D,
        lambda c: c.query.dtype in _TYPES and c.query.dtype == c.key.dtype == c.value.dtype,
        lambda c: f"query, key and value are all fp16, bf16 or fp32, got {[x.dtype for x in _tensors(c)]}",
    ),
    _Rule("padding_mask", _D, lambda c: c.padding_mask is None, lambda c: "padding_mask is not supported"),
    _Rule(
        "query heads",
        _T,
        lambda c: (
            c.query.shape[-1] % c.head_num == 0
            if "H" in c.input_layout
            else c.query.shape[c.input_layout.index("N")] == c.head_num
        ),
        lambda c: f"head_num {c.head_num} is not that of a {c.input_layout} query of shape {tuple(c.query.shape)}",
    ),
    _Rule(
        "sizes alike",
        _D,
        sizes_are_alike,
        lambda c: f"tokens, heads or sequences differ: {[tuple(x.shape) for x in _tensors(c)]}",
    ),
    _Rule(
        "something to attend",
        _D,
        lambda c: min(x.numel() for x in _tensors(c)) > 0,
        lambda c: f"a sequence has at least one token, got {[tuple(x.shape) for x in _tensors(c)]}",
    ),
    _Rule(
        "head size",
        _D,
        lambda c: 1 <= c.head_dim <= 768 and dims_are_alike(c),
        lambda c: f"heads are 1 to 768 wide, alike in query and key, no wider in value, got {c.head_dim}",
    ),
    _Rule(
        "grouped heads",
        _D,
        lambda c: c.kv_heads > 0 and c.head_num % c.kv_heads == 0,
        lambda c: f"{c.head_num} query heads are no multiple of {c.kv_heads} key heads",
    ),
    _Rule("most heads", _D, lambda c: c.head_num <= 256, lambda c: f"at most 256 heads, got {c.head_num}"),
    _Rule(
        "lengths cumulative",
        _D,
        lambda c: not c.packed or lengths_are_cumulative(c),
        lambda c: (
            "lengths add up and end with the last token. The length of each sequence in their place is computed as "
            "another pack; of a tail that no sequence covers, which the page allows by zeros at the end of both lists, "
            f"the output is whatever was there; got {c.actual_seq_qlen} for {len(c.query)} queries and "
            f"{c.actual_seq_kvlen} for {len(c.key)} keys"
        ),
        silent=True,
    ),
    _Rule(
        "most sequences",
        _D,
        lambda c: len(c.query_lengths) <= (MAX_PACK_SEQUENCES if c.packed else 2**21),
        lambda c: f"a pack holds at most {MAX_PACK_SEQUENCES} sequences, a batch 2 M, got {len(c.query_lengths)}",
    ),
    _Rule(
        "most tokens",
        _D,
        lambda c: max((len(c.query), len(c.key)) if c.packed else (*c.query_lengths, *c.key_lengths)) <= 2**20,
        lambda c: "a sequence, or a pack, has at most 1 M tokens",
    ),
    _Rule(
        "scale",
        _D,
        lambda c: c.scale != 1.0 or c.head_dim == 1,
        lambda c: f"scale is 1.0, its default, with heads of {c.head_dim}: 1 / sqrt(d) is for the caller to pass",
        silent=True,
    ),
    _Rule(
        "mask given",
        _D,
        lambda c: (
            c.atten_mask is not None
            or (c.sparse_mode == 0 and min(c.pre_tockens, c.next_tockens) == NO_LIMIT and c.prefix is None)
        ),
        lambda c: (
            f"without atten_mask everyone sees everyone: sparse_mode {c.sparse_mode}, pre_tockens "
            f"{c.pre_tockens}, next_tockens {c.next_tockens} and prefix are ignored"
        ),
        silent=True,
    ),
    _Rule(
        "mask type",
        _D,
        lambda c: c.atten_mask is None or c.atten_mask.dtype in (torch.bool, torch.uint8),
        lambda c: f"atten_mask is bool or uint8, got {c.atten_mask.dtype}",
    ),
    _Rule(
        "mask shape",
        _D,
        lambda c: c.atten_mask is None or c.compressed or tuple(c.atten_mask.shape) in list_mask_shapes(c),
        lambda c: f"atten_mask is one of {sorted(list_mask_shapes(c))}, got {tuple(c.atten_mask.shape)}",
    ),
    _Rule(
        "compressed mask shape",
        _D,
        has_compressed_shape,
        lambda c: f"sparse_mode {c.sparse_mode} takes a mask of 2048 x 2048, got {tuple(c.atten_mask.shape)}",
    ),
    _Rule(
        "compressed mask content",
        _D,
        lambda c: c.atten_mask is None or not c.compressed or is_triangle(c.atten_mask),
        lambda c: "the compressed mask is not True above the diagonal and False elsewhere",
        silent=True,
    ),
    _Rule(
        "band",
        _D,
        band_is_not_empty,
        lambda c: (
            f"sparse_mode 4: pre_tockens {c.pre_tockens} and next_tockens {c.next_tockens} have nothing in common"
        ),
    ),
    _Rule(
        "rows that see nothing",
        _D,
        every_row_sees_a_key,
        lambda c: "a query sees no key: its output is undefined, of a pack always, else without inner_precise=2",
        silent=True,
    ),
)
"""The requirements, in an order in which each may assume those before it."""


def check(call: Call) -> None:
    """Raise RefusedError or SilentError for the first requirement that a call breaks."""
    check_call("npu_fusion_attention", REQUIREMENTS, call)
