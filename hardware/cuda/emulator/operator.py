"""``varlen_attn`` on a CPU: torch's own function, operator and autograd formula, with kernels that check and compute.

torch's Python runs as on a device, down to ``torch_attn::_varlen_attn`` and its backward. Kernels for tensors of the
CPU, for which torch has none, check each call against ``contract.py``, and then compute it as attention is defined. The
two operators have no public name; they are those of torch 2.11 to 2.14.
"""

import torch
from torch import Tensor

from hardware.cuda.emulator.contract import check
from hardware.cuda.kernel_call import Call

STANDS_FOR_16_BITS = torch.float32
"""Type that is accepted instead of bf16, so that results agree with others to rounding; a device refuses it."""
_INSTALLED: list[bool] = []


def install() -> None:
    """Register kernels for the operators in this process; a second call does nothing."""
    from torch.nn.attention import varlen  # which takes seconds, since it imports torch's compiler

    if not _INSTALLED:
        varlen._varlen_attn.register_kernel("cpu")(_forward)
        varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
        _INSTALLED.append(True)


def _call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale, seqused_k=None, block_table=None):
    before, after = window_size or (-1, -1)
    rest = (before, after), scale, seqused_k, block_table, STANDS_FOR_16_BITS
    return Call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *rest)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale, seqused_k, block_table)
    check(call)
    out = torch.empty(query.shape, dtype=query.dtype)
    log_sum = torch.empty(query.shape[1], len(query))
    for queries, keys, see in call.list_groups():
        scores = _scores(call, queries, keys, see)  # [n, h, q, k]
        attended = scores.softmax(-1) @ _heads(call, value, keys)
        out[queries] = attended.transpose(1, 2).to(out.dtype)
        log_sum[:, queries] = scores.logsumexp(-1).transpose(0, 1)
    return out, log_sum, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients, with ``p = softmax(z)`` and ``o = p v``: ``d p = d o v^T``,
    ``d z = p * (d p - sum(p * d p))``."""
    call = _call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale)
    check(call)
    groups = query.shape[1] // key.shape[1]
    d_query, d_key, d_value = (torch.zeros(x.shape) for x in call.tensors)
    for queries, keys, see in call.list_groups():
        weights = _scores(call, queries, keys, see).softmax(-1)
        d_out = grad_out[queries].float().transpose(1, 2)  # [n, h, q, d]
        d_weights = d_out @ _heads(call, value, keys).mT
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * call.scaled_by
        d_query[queries] = (d_scores @ _heads(call, key, keys)).transpose(1, 2)
        for total, each in (
            (d_key, d_scores.mT @ query[queries].float().transpose(1, 2)),
            (d_value, weights.mT @ d_out),
        ):
            total[keys] = each.unflatten(1, (-1, groups)).sum(2).transpose(1, 2)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _heads(call: Call, x: Tensor, tokens: Tensor) -> Tensor:
    """Expand keys or values to all query heads, in fp32: ``[n, h, tokens, d]``."""
    return x[tokens].float().transpose(1, 2).repeat_interleave(call.query.shape[1] // x.shape[1], 1)


def _scores(call: Call, queries: Tensor, keys: Tensor, see: Tensor) -> Tensor:
    """Compute scores ``[n, h, q, k]``, -inf where a query does not see a key."""
    scores = call.query[queries].float().transpose(1, 2) @ _heads(call, call.key, keys).mT * call.scaled_by
    return scores.masked_fill(~see, -torch.inf)
