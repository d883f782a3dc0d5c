"""``chunk_gated_delta_rule`` of FLA on a CPU: its contract, and the rule token by token.

Sources: fla-core 0.6.0. ``chunk.py`` of ``fla/ops/gated_delta_rule`` and ``chunk_delta_h.py`` of ``fla/ops/common``
raise; its docstring says more; the kernels read and write where they are told, and raise nothing.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from hardware.attention.contract import NotEmulatedError, Requirement, Source, check_call

MAX_KEY = 256
"""Widest keys that the kernels take."""
STANDS_FOR_16_BITS = torch.float32
"""Type that is accepted instead of bf16, so that results agree with others to rounding; of it a device rounds products
to TF32."""
_C, _H, _T = Source("chunk.py"), Source("chunk_delta_h.py"), Source("Triton")
_D, _K = Source("its docstring", refuses=False), Source("the kernels", refuses=False)
_TYPES = (torch.float16, torch.bfloat16)
_Rule = Requirement[SimpleNamespace]


def _list_lengths(call: SimpleNamespace) -> list[int]:
    return call.cu_seqlens.diff().tolist()


REQUIREMENTS: tuple[_Rule, ...] = (
    _Rule(
        "rank",
        _D,
        lambda c: [x.dim() for x in (c.q, c.k, c.v, c.g, c.beta)] == [4, 4, 4, 3, 3],
        lambda c: "q, k and v are [1, tokens, heads, d], g and beta [1, tokens, value heads]",
    ),
    _Rule(
        "device",
        _T,
        lambda c: len({x.device for x in (c.q, c.k, c.v, c.g, c.beta, c.cu_seqlens)}) == 1,
        lambda c: f"all but cu_seqlens_cpu are on one device, got cu_seqlens on {c.cu_seqlens.device}",
    ),
    _Rule("one row", _C, lambda c: len(c.q) == 1, lambda c: f"with cu_seqlens there is one row, got {len(c.q)}"),
    _Rule(
        "key heads",
        _C,
        lambda c: c.q.shape[2] == c.k.shape[2],
        lambda c: f"q and k have as many heads, got {c.q.shape[2]} and {c.k.shape[2]}",
    ),
    _Rule(
        "grouped heads",
        _C,
        lambda c: c.v.shape[2] % c.q.shape[2] == 0,
        lambda c: f"{c.v.shape[2]} value heads are no multiple of {c.q.shape[2]} key heads",
    ),
    _Rule(
        "key size",
        _H,
        lambda c: c.k.shape[3] <= MAX_KEY,
        lambda c: f"keys are at most {MAX_KEY} wide, got {c.k.shape[3]}",
    ),
    _Rule(
        "types alike",
        _T,
        lambda c: c.q.dtype == c.k.dtype == c.v.dtype,
        lambda c: f"q, k and v are of one type, got {c.q.dtype}, {c.k.dtype} and {c.v.dtype}",
    ),
    _Rule(
        "16 bits",
        _K,
        lambda c: c.q.dtype in (*_TYPES, c.stands_for_16_bits),
        lambda c: f"q, k and v are fp16 or bf16, got {c.q.dtype}, whose products are rounded to TF32",
        silent=True,
    ),
    _Rule(
        "shapes alike",
        _K,
        lambda c: c.q.shape == c.k.shape and c.q.shape[:2] == c.v.shape[:2],
        lambda c: f"q and k have one shape, v as many tokens, got {[tuple(x.shape) for x in (c.q, c.k, c.v)]}",
        silent=True,
    ),
    _Rule(
        "gates of value heads",
        _K,
        lambda c: c.g.shape == c.beta.shape == c.v.shape[:3],
        lambda c: f"g and beta are {tuple(c.v.shape[:3])}, got {tuple(c.g.shape)} and {tuple(c.beta.shape)}",
        silent=True,
    ),
    _Rule(
        "bounds",
        _D,
        lambda c: c.cu_seqlens.dtype == torch.int64 and c.cu_seqlens.dim() == 1 and len(c.cu_seqlens) >= 2,
        lambda c: f"cu_seqlens are [sequences + 1] int64, got {tuple(c.cu_seqlens.shape)} {c.cu_seqlens.dtype}",
    ),
    _Rule(
        "bounds of the host",
        _K,
        lambda c: c.cu_seqlens_cpu is None or c.cu_seqlens_cpu.tolist() == c.cu_seqlens.tolist(),
        lambda c: f"cu_seqlens_cpu are the same, got {c.cu_seqlens_cpu.tolist()} for {c.cu_seqlens.tolist()}",
        silent=True,
    ),
    _Rule(
        "every token covered",
        _K,
        lambda c: c.cu_seqlens[0] == 0 and c.cu_seqlens[-1] == c.q.shape[1],
        lambda c: f"other tokens are memory that nobody wrote: {c.cu_seqlens.tolist()} of {c.q.shape[1]} tokens",
        silent=True,
    ),
    _Rule(
        "bounds rise",
        _K,
        lambda c: min(_list_lengths(c)) > 0,
        lambda c: f"a sequence without a token, which shifts those after it before 0.5.1: {c.cu_seqlens.tolist()}",
        silent=True,
    ),
    _Rule(
        "a state each",
        _C,
        lambda c: c.initial_state is None or len(c.initial_state) == len(_list_lengths(c)),
        lambda c: f"each of {len(_list_lengths(c))} sequences has an initial state, got {len(c.initial_state)}",
    ),
    _Rule(
        "shape of states",
        _K,
        lambda c: c.initial_state is None or c.initial_state.shape[1:] == (*c.v.shape[2:3], c.k.shape[3], c.v.shape[3]),
        lambda c: f"states are [sequences, value heads, key size, value size], got {tuple(c.initial_state.shape)}",
        silent=True,
    ),
    _Rule(
        "type of states",
        _K,
        lambda c: c.initial_state is None or c.initial_state.dtype == torch.float32,
        lambda c: f"states go on in fp32, as the kernels return them, got {c.initial_state.dtype}, which rounds them",
        silent=True,
    ),
)
"""The requirements, in an order in which each may assume those before it."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    stands_for_16_bits: torch.dtype | None = STANDS_FOR_16_BITS,
) -> tuple[Tensor, Tensor | None]:
    """Check a call, and compute the rule token by token; arguments and results are those of FLA's function.

    Further arguments of FLA's function are no arguments here: FLA ignores names that it does not know, and their order
    is another in each version.

    Args:
        stands_for_16_bits: a type that is accepted instead of bf16; None accepts only a device's types.

    Raises:
        RefusedError, SilentError: the call breaks a requirement. NotEmulatedError: it has no cu_seqlens.
    """
    if cu_seqlens is None:
        raise NotEmulatedError("chunk_gated_delta_rule, emulated: rows without cu_seqlens")
    call = SimpleNamespace(**locals())
    check_call("chunk_gated_delta_rule", REQUIREMENTS, call)
    lengths, ratio = torch.tensor(_list_lengths(call)), v.shape[2] // q.shape[2]
    query, key = (x[0].float().repeat_interleave(ratio, 1) for x in (q, k))  # [tokens, value heads, dk]
    if use_qk_l2norm_in_kernel:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query = query * (k.shape[-1] ** -0.5 if scale is None else scale)

    there = torch.arange(int(lengths.max())) < lengths[:, None]  # [sequences, longest]
    place = torch.where(there, cu_seqlens[:-1, None] + torch.arange(there.shape[1]), 0)
    # After its last token a state neither decays nor changes.
    gates = (torch.where(there[..., None], x[0].float()[place], 0) for x in (g, beta))
    tokens = zip(*(x.unbind(1) for x in (query[place], key[place], v[0].float()[place], *gates)), strict=True)
    states, outs = initial_state, []
    if states is None:
        states = torch.zeros(len(lengths), v.shape[2], k.shape[3], v.shape[3])
    for q_t, k_t, v_t, g_t, beta_t in tokens:  # [sequences, value heads, ...]
        states = states * g_t.exp()[..., None, None]
        read = torch.einsum("nhkv,nhk->nhv", states, k_t)
        states = states + torch.einsum("nhk,nhv->nhkv", k_t, (v_t - read) * beta_t[..., None])
        outs.append(torch.einsum("nhkv,nhk->nhv", states, q_t))
    out = torch.stack(outs, 1)[there][None].to(q.dtype)  # sequence after sequence, as the tokens are
    return out, states if output_final_state else None
