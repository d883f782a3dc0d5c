"""The requirements of ``varlen_attn``: all that its code checks, and every misuse that it computes in silence.

Each requirement names its source: ATen's ``flash_api.cpp``, which raises; ``torch/nn/attention/varlen.py``, which
raises before it; or known behaviour of the kernels, which raise nothing. Checks of torch's Python are repeated here,
since torch 2.11 lacks some of them.
"""

import torch

from hardware.attention.contract import Requirement, Source, check_call
from hardware.cuda.kernel_call import HEAD_UNIT, MAX_HEAD, TYPES, Call

_F, _V = Source("flash_api.cpp"), Source("varlen.py")
_K = Source("the kernels", refuses=False)


def _every_query_sees_a_key(call: Call) -> bool:
    """Check the first query of each sequence, whose diagonal is the lowest; a window below 0 is unlimited."""
    after = call.window_size[1]
    pairs = zip(call.query_lengths, call.key_lengths)
    return all(keys > 0 and (after < 0 or keys - queries + after >= 0) for queries, keys in pairs)


REQUIREMENTS: tuple[Requirement[Call], ...] = (
    Requirement(
        "rank",
        _F,
        lambda c: all(x.dim() == 3 for x in c.tensors),
        lambda c: f"query, key and value are [tokens, heads, d], got {[tuple(x.shape) for x in c.tensors]}",
    ),
    Requirement(
        "dtype",
        _F,
        lambda c: len({x.dtype for x in c.tensors}) == 1 and c.query.dtype in (*TYPES, c.stands_for_16_bits),
        lambda c: f"query, key and value are all fp16 or all bf16, got {[x.dtype for x in c.tensors]}",
    ),
    Requirement(
        "device",
        _F,
        lambda c: len({x.device for x in (*c.tensors, *c.bounds)}) == 1,
        lambda c: f"all tensors are on one device, got {[str(x.device) for x in (*c.tensors, *c.bounds)]}",
    ),
    Requirement(
        "bounds dtype",
        _F,
        lambda c: all(x.dtype == torch.int32 for x in c.bounds),
        lambda c: f"cu_seq_q and cu_seq_k are int32, got {[x.dtype for x in c.bounds]}",
    ),
    Requirement(
        "bounds shape",
        _F,
        lambda c: all(x.dim() == 1 for x in c.bounds) and c.cu_seq_q.numel() == c.cu_seq_k.numel() >= 2,
        lambda c: f"cu_seq_q and cu_seq_k are vectors, equally long, got {[tuple(x.shape) for x in c.bounds]}",
    ),
    Requirement(
        "bounds contiguous",
        _F,
        lambda c: all(x.is_contiguous() for x in c.bounds),
        lambda c: f"cu_seq_q and cu_seq_k are contiguous, got strides {[x.stride() for x in c.bounds]}",
    ),
    Requirement(
        "last dimension",
        _F,
        lambda c: all(x.stride(-1) == 1 for x in c.tensors),
        lambda c: f"the last dimension is contiguous, got strides {[x.stride() for x in c.tensors]}",
    ),
    Requirement(
        "head size",
        _F,
        lambda c: c.query.shape[-1] % HEAD_UNIT == 0 and 0 < c.query.shape[-1] <= MAX_HEAD,
        lambda c: f"heads are a multiple of {HEAD_UNIT} and at most {MAX_HEAD} wide, got {c.query.shape[-1]}",
    ),
    Requirement(
        "keys alike",
        _F,
        lambda c: c.key.shape == c.value.shape and len({x.shape[-1] for x in c.tensors}) == 1,
        lambda c: f"key and value are of one shape and of query's head size, got {[tuple(x.shape) for x in c.tensors]}",
    ),
    Requirement(
        "grouped heads",
        _V,
        lambda c: c.key.shape[1] > 0 and c.query.shape[1] % c.key.shape[1] == 0,
        lambda c: f"{c.query.shape[1]} query heads are no multiple of {c.key.shape[1]} key heads",
    ),
    Requirement(
        "training arguments",
        _V,
        lambda c: c.seqused_k is None and c.block_table is None,
        lambda c: "seqused_k and block_table have no backward",
    ),
    Requirement(
        "one query each",
        _F,
        # It takes grouped heads for queries of one sequence then, an optimization of decoding.
        lambda c: (
            not (c.max_q == 1 and c.query.shape[1] > c.key.shape[1] and max(c.window_size) < 0)
            or len(c.query) == c.cu_seq_q.numel() - 1
        ),
        lambda c: (
            "with max_q 1, grouped heads and no window the kernel takes exactly one query of each sequence, got "
            f"{len(c.query)} for {c.cu_seq_q.numel() - 1} sequences"
        ),
    ),
    Requirement(
        "window given",
        _K,
        lambda c: tuple(c.window_size) != (-1, -1),
        lambda c: (
            "window_size (-1, -1), its default, is full attention; torch 2.14 may take cuDNN's kernel for it, whose "
            "backward reads where nothing is (PyTorch's pull request 186142); pass (max_k, -1)"
        ),
        silent=True,
    ),
    Requirement(
        "every token covered",
        _K,
        lambda c: all(
            ends[0] == 0 and ends[-1] == len(x) for ends, x in ((c.query_ends, c.query), (c.key_ends, c.key))
        ),
        lambda c: (
            "rows outside of the bounds are memory that nobody wrote, in outputs and in gradients (PyTorch's issue "
            f"176793): bounds {c.query_ends} of {len(c.query)} queries, {c.key_ends} of {len(c.key)} keys"
        ),
        silent=True,
    ),
    Requirement(
        "bounds rise",
        _K,
        lambda c: min(c.query_lengths) > 0 and min(c.key_lengths) >= 0,
        lambda c: (
            f"a sequence without a query: bounds {c.query_ends}, {c.key_ends}; FA3 hung on such in backward "
            "(flash-attention's issue 1254), and bounds that fall are read as something else"
        ),
        silent=True,
    ),
    Requirement(
        "longest",
        _K,
        lambda c: c.max_q >= max(c.query_lengths) and c.max_k >= max(c.key_lengths),
        lambda c: (
            f"max_q {c.max_q} and max_k {c.max_k} are below the longest sequence, {max(c.query_lengths)} and "
            f"{max(c.key_lengths)}, whose rest nobody computes"
        ),
        silent=True,
    ),
    Requirement(
        "rows that see nothing",
        _K,
        _every_query_sees_a_key,
        lambda c: (
            f"a query sees no key, and its output is 0: window_size {c.window_size}, lengths {c.query_lengths}, "
            f"{c.key_lengths}"
        ),
        silent=True,
    ),
)
"""The requirements, in an order in which each may assume those before it."""


def check(call: Call) -> None:
    """Raise RefusedError or SilentError for the first requirement that a call breaks."""
    check_call("varlen_attn", REQUIREMENTS, call)
