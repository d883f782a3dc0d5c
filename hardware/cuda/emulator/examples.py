"""Calls of ``varlen_attn`` for each requirement: one that breaks it and one that keeps it, on any device.

The calls break nothing else. So an emulated kernel and a real one can be tested with the same calls.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from hardware.attention.contract import KernelContract
from hardware.cuda.emulator.contract import REQUIREMENTS, check
from hardware.cuda.kernel_call import Call

HEADS, KEY_HEADS, DIM = 4, 2, 8


def make_example_call(device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Make the arguments of a valid call of ``varlen_attn``: two sequences of three and five tokens, causal."""
    bounds = _bounds(3, 5, device=device)
    return dict(
        query=_draw(8, HEADS, device=device, dtype=dtype),
        key=_draw(8, KEY_HEADS, device=device, dtype=dtype),
        value=_draw(8, KEY_HEADS, device=device, dtype=dtype),
        cu_seq_q=bounds,
        cu_seq_k=bounds,
        max_q=5,
        max_k=5,
        scale=DIM**-0.5,
        window_size=(-1, 0),
    )


def make_examples(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[dict, ...]]:
    """Return name of a requirement -> changes to ``make_example_call`` that break it, and changes that keep it."""
    on: dict[str, Any] = dict(device=device, dtype=dtype)
    elsewhere = "meta" if torch.device(device).type == "cpu" else "cpu"
    bounds = _bounds(3, 5, device=device)
    query = _draw(8, HEADS, **on)
    return {
        "rank": (dict(query=query[:, None]), {}),
        "dtype": (_tensors(device=device, dtype=torch.float64), _tensors(device=device, dtype=torch.float16)),
        "device": (dict(cu_seq_q=bounds.to(elsewhere)), {}),
        "bounds dtype": (dict(cu_seq_q=bounds.long(), cu_seq_k=bounds.long()), {}),
        "bounds shape": (dict(cu_seq_k=_bounds(3, 2, 3, device=device)), {}),
        "bounds contiguous": (dict(cu_seq_q=bounds.repeat_interleave(2)[::2]), {}),
        "last dimension": (dict(query=query.mT.contiguous().mT), dict(query=query[:, :1].expand_as(query))),
        "head size": (_tensors(dim=12, **on), _tensors(dim=16, **on)),
        "keys alike": (dict(value=_draw(8, 1, **on)), {}),
        "grouped heads": (
            dict(key=_draw(8, 3, **on), value=_draw(8, 3, **on)),
            dict(key=_draw(8, 1, **on), value=_draw(8, 1, **on)),
        ),
        "training arguments": (dict(seqused_k=torch.tensor([3, 5], dtype=torch.int32, device=device)), {}),
        "one query each": tuple(
            dict(query=_draw(count, HEADS, **on), cu_seq_q=_bounds(1, 1, device=device), max_q=1, window_size=window)
            for count, window in ((3, (-1, -1)), (2, (5, -1)))
        ),
        "window given": (dict(window_size=(-1, -1)), dict(window_size=(5, -1))),
        "every token covered": (dict.fromkeys(("cu_seq_q", "cu_seq_k"), _bounds(3, 4, device=device)), {}),
        "bounds rise": (dict.fromkeys(("cu_seq_q", "cu_seq_k"), _bounds(3, 0, 5, device=device)), {}),
        "longest": (dict(max_q=4), dict(max_q=6)),
        "rows that see nothing": tuple(
            _tensors(keys=keys, **on) | dict(cu_seq_k=_bounds(keys - 6, 6, device=device), max_k=6) for keys in (8, 10)
        ),
    }


def build_contract(device: torch.device) -> KernelContract:
    """Build the contract of ``varlen_attn`` with these calls, made through torch's own function."""
    from torch.nn.attention import varlen  # which takes seconds, since it imports torch's compiler

    asks_for_groups = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters

    def attend(**arguments: Any) -> Any:
        if any(isinstance(x, Tensor) and x.is_meta for x in arguments.values()):
            check(Call(**arguments))  # a CPU's other device has shapes alone, and no kernel is asked there
        grouped = arguments["query"].shape[1] != arguments["key"].shape[1]
        return varlen.varlen_attn(**arguments, **{"enable_gqa": grouped} if asks_for_groups else {})

    right = make_example_call(device)
    calls = {name: (right | broken, right | kept) for name, (broken, kept) in make_examples(device).items()}
    return KernelContract(REQUIREMENTS, calls, attend)


def _draw(tokens: int, heads: int, *, dim: int = DIM, **on: Any) -> Tensor:
    """Draw random numbers, the same at every call and on every device."""
    generator = torch.Generator().manual_seed(tokens * 1000 + heads)
    return torch.randn(tokens, heads, dim, generator=generator).to(**on)


def _tensors(*, keys: int = 8, **to: Any) -> dict[str, Tensor]:
    drawn = dict(key=_draw(keys, KEY_HEADS, **to), value=_draw(keys, KEY_HEADS, **to).flip(0))
    return dict(query=_draw(8, HEADS, **to)) | drawn


def _bounds(*lengths: int, device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
