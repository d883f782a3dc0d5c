"""Calls of ``npu_fusion_attention`` for each requirement: one that breaks it and one that keeps it, on any device.

The calls break nothing else. So an emulated operator and a real one can be tested with the same calls.
"""

from typing import Any

import torch
from torch import Tensor

from hardware.attention.contract import KernelContract
from hardware.npu.emulator.contract import REQUIREMENTS
from hardware.npu.kernel_call import build_triangle

HEADS, KV_HEADS, DIM = 4, 2, 8
_TND = {"input_layout": "TND"}


def make_example_call(device: torch.device | str = "cpu", **changes: Any) -> dict[str, Any]:
    """Make the arguments of a valid call with ``changes``: two sequences of six tokens in BNSD, or of three and five in
    TND.

    The mask is causal, by ``sparse_mode`` 2.
    """
    generator = torch.Generator().manual_seed(0)
    layout = changes.get("input_layout", "BNSD").upper()
    shape = (lambda heads: (8, heads, DIM)) if layout == "TND" else (lambda heads: (2, heads, 6, DIM))
    arguments: dict[str, Any] = dict(
        query=torch.randn(shape(HEADS), generator=generator),
        key=torch.randn(shape(KV_HEADS), generator=generator),
        value=torch.randn(shape(KV_HEADS), generator=generator),
        head_num=HEADS,
        input_layout="BNSD",
        scale=DIM**-0.5,
        sparse_mode=2,
    )
    if "atten_mask" not in changes:
        arguments["atten_mask"] = build_triangle()
    if layout == "TND":
        arguments |= dict(actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8])
    arguments |= changes
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def make_pack(queries: list[int], keys: list[int], **changes) -> dict:
    """Make the changes for a pack of sequences with these numbers of queries and keys."""
    totals = [torch.tensor(lengths).cumsum(0).tolist() for lengths in (queries, keys)]
    drawn = dict(
        query=torch.randn(sum(queries), HEADS, DIM),
        key=torch.randn(sum(keys), KV_HEADS, DIM),
        value=torch.randn(sum(keys), KV_HEADS, DIM),
    )
    return drawn | dict(input_layout="TND", actual_seq_qlen=totals[0], actual_seq_kvlen=totals[1]) | changes


def make_examples() -> dict[str, tuple[dict[str, Any], ...]]:
    """Return name of a requirement -> changes to ``make_example_call`` that break it, and changes that keep it."""
    return _make_size_examples() | _make_mask_examples()


def build_contract(device: torch.device) -> KernelContract:
    """Build the contract of ``npu_fusion_attention`` with these calls, made through the registered operator."""
    calls = {
        name: (make_example_call(device, **broken), make_example_call(device, **kept))
        for name, (broken, kept) in make_examples().items()
    }
    operator = torch.ops.npu.npu_fusion_attention
    return KernelContract(REQUIREMENTS, calls, lambda **arguments: operator(**arguments)[0])


def _make_size_examples() -> dict[str, tuple[dict[str, Any], ...]]:
    return {
        "head_num": (dict(head_num=0), {}),
        "rank": (dict(query=torch.zeros(2, 4)), {}),
        "keep_prob": (dict(keep_prob=0.0), dict(keep_prob=1.0)),
        "input_layout": (dict(input_layout="bnsd"), dict(input_layout="BNSD")),
        "layout rank": (dict(input_layout="BSH"), _TND),
        "softmax_layout": (dict(softmax_layout="TND"), dict(softmax_layout="TND", **_TND)),
        "sparse_mode": (dict(sparse_mode=9, **_TND), dict(sparse_mode=3, **_TND)),
        "lengths given": (dict(actual_seq_kvlen=None, **_TND), _TND),
        "lengths unasked": (dict(actual_seq_qlen=[6, 12], actual_seq_kvlen=[6, 12]), {}),
        "dtype": (dict(query=torch.randn(2, HEADS, 6, DIM, dtype=torch.float64)), {}),
        "padding_mask": (dict(padding_mask=torch.zeros(2, 6)), dict(padding_mask=None)),
        "query heads": (dict(head_num=2), dict(head_num=HEADS)),
        "sizes alike": (dict(value=torch.randn(2, KV_HEADS, 7, DIM)), {}),
        "something to attend": (dict(query=torch.randn(2, HEADS, 0, DIM)), dict(query=torch.randn(2, HEADS, 1, DIM))),
        "head size": (
            dict(key=torch.randn(2, KV_HEADS, 6, 4), value=torch.randn(2, KV_HEADS, 6, 4)),
            dict(value=torch.randn(2, KV_HEADS, 6, 4)),
        ),
        "grouped heads": (
            dict(key=torch.randn(2, 3, 6, DIM), value=torch.randn(2, 3, 6, DIM)),
            dict(key=torch.randn(2, 1, 6, DIM), value=torch.randn(2, 1, 6, DIM)),
        ),
        "most heads": tuple(
            dict.fromkeys(("query", "key", "value"), torch.zeros(1, heads, 2, 2)) | {"head_num": heads}
            for heads in (257, 256)
        ),
        "lengths cumulative": (
            dict(actual_seq_qlen=[3, 5], actual_seq_kvlen=[3, 5], **_TND),
            dict(actual_seq_qlen=[3, 3, 8, 0], actual_seq_kvlen=[3, 3, 8, 0], **_TND),
        ),
        "most sequences": (make_pack([1] * 1025, [1] * 1025), make_pack([1] * 1024, [1] * 1024)),
        "most tokens": (
            dict.fromkeys(("query", "key", "value"), torch.zeros(2**20 + 1, 1, 2, dtype=torch.float16))
            | dict(head_num=1, actual_seq_qlen=[1, 2**20 + 1], actual_seq_kvlen=[1, 2**20 + 1], **_TND),
            {},
        ),
        "scale": (dict(scale=1.0), dict(scale=0.3)),
    }


def _make_mask_examples() -> dict[str, tuple[dict[str, Any], ...]]:
    causal = build_triangle()
    return {
        "mask given": (dict(atten_mask=None), dict(atten_mask=None, sparse_mode=0)),
        "mask type": (dict(atten_mask=causal.float()), dict(atten_mask=causal.to(torch.uint8))),
        "mask shape": (
            dict(atten_mask=torch.zeros(2, 6, dtype=torch.bool), sparse_mode=1),
            dict(atten_mask=torch.zeros(2, 1, 6, 6, dtype=torch.bool), sparse_mode=1),
        ),
        "compressed mask shape": (dict(atten_mask=causal[:6, :6]), dict(atten_mask=causal[None, None])),
        "compressed mask content": (dict(atten_mask=~causal), {}),
        "band": (
            dict(sparse_mode=4, pre_tockens=-3, next_tockens=0),
            dict(sparse_mode=4, pre_tockens=2, next_tockens=0),
        ),
        "rows that see nothing": (make_pack([4], [2], sparse_mode=3), make_pack([2], [4], sparse_mode=3)),
    }
