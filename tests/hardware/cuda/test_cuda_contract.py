"""The emulated ``varlen_attn``: for each requirement a call that breaks it and one that does not; its arithmetic."""

import inspect
import itertools
from dataclasses import replace

import pytest
import torch
from support.attention import check_refusals

from hardware.attention.contract import RefusedError, SilentError
from hardware.cuda.emulator.contract import REQUIREMENTS, check
from hardware.cuda.emulator.examples import DIM, HEADS, KEY_HEADS, make_example_call, make_examples
from hardware.cuda.emulator.operator import install
from hardware.cuda.kernel_call import Call

EXAMPLES = make_examples()
TORCH_CHECKS = {"rank", "grouped heads"}
"""What the Python of torch 2.12 and later finds before it calls the operator."""


@pytest.fixture(scope="module", autouse=True)
def operator():
    install()


def load_varlen():
    from torch.nn.attention import varlen

    return varlen


def call_varlen(query, key, value, **arguments):
    """Call torch's function, which has a flag for fewer key heads from 2.12 on, and takes them without it before."""
    varlen_attn = load_varlen().varlen_attn
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        arguments["enable_gqa"] = query.shape[1] != key.shape[1]
    return varlen_attn(query, key, value, **arguments)


def attend(**changes):
    return call_varlen(**make_example_call() | changes)


def check_call(**changes) -> torch.Tensor:
    """Check a call alone, then attend by it; returns the gradient of its query."""
    arguments = make_example_call() | changes
    check(Call(**arguments))
    query = arguments["query"].clone().requires_grad_()
    out = attend(**changes | {"query": query})
    out.float().sum().backward()
    assert out.isfinite().all()
    return query.grad


def test_a_call_that_breaks_a_requirement_raises_and_one_that_keeps_it_does_not():
    check_refusals(REQUIREMENTS, EXAMPLES, check_call)
    taken = inspect.signature(load_varlen().varlen_attn).parameters.keys()
    for name, (wrong, _) in EXAMPLES.items():
        if name != "device" and wrong.keys() <= taken:  # a CPU has one device; 2.11 takes fewer arguments
            with pytest.raises((ValueError, RefusedError) if name in TORCH_CHECKS else (RefusedError, SilentError)):
                attend(**wrong)


def test_backward_is_checked_too():
    """What torch keeps for it may be changed between the two passes."""
    arguments = make_example_call()
    query = arguments["query"].requires_grad_()
    out = attend(**arguments)
    with torch.no_grad():
        arguments["cu_seq_q"].data[-1] = 7
    with pytest.raises(SilentError, match="every token covered"):
        out.float().sum().backward()
    assert query.grad is None


def test_fp32_stands_for_bf16_and_a_device_is_not_said_to_take_it():
    call = Call(**make_example_call(dtype=torch.float32))
    with pytest.raises(RefusedError, match=r"dtype \(flash_api.cpp; on a device: refused\): .*all fp16 or all bf16"):
        check(call)
    check(replace(call, stands_for_16_bits=torch.float32))
    assert attend(**make_example_call(dtype=torch.float32)).dtype == torch.float32


# -- arithmetic


def by_hand(query, key, value, bounds, key_bounds, window):
    """One pair at a time, in fp64: query i of n sees key j of m where its distance from the diagonal, which ends in the
    last corner, is within the window."""
    outs = []
    for (start, end), (key_start, key_end) in zip(itertools.pairwise(bounds), itertools.pairwise(key_bounds)):
        for i in range(end - start):
            diagonal = i + (key_end - key_start) - (end - start)
            seen = [
                key_start + j
                for j in range(key_end - key_start)
                if (window[0] < 0 or diagonal - j <= window[0]) and (window[1] < 0 or j - diagonal <= window[1])
            ]
            heads = []
            for head in range(query.shape[1]):
                own = head * key.shape[1] // query.shape[1]
                weights = (key[seen, own] @ query[start + i, head] * 0.3).softmax(0)
                heads.append(weights @ value[seen, own])
            outs.append(torch.stack(heads))
    return torch.stack(outs)


CASES = {
    "causal": ((3, 1, 5), (3, 1, 5), (-1, 0)),
    "all": ((3, 1, 5), (3, 1, 5), (5, -1)),
    "more keys": ((2, 3), (6, 4), (-1, 0)),
    "fewer keys": ((4, 3), (2, 5), (9, -1)),
    "window": ((6, 4), (6, 7), (2, 0)),
    "window to both sides": ((6, 4), (6, 4), (2, 1)),
    "window and the future": ((5, 3), (7, 3), (2, -1)),
    "alike": ((4, 2, 4, 4), (4, 3, 4, 4), (-1, 0)),
}
"""Queries and keys of each sequence, and the window."""


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_definition(case, heads):
    queries, keys, window = CASES[case]
    torch.manual_seed(0)
    sizes = zip((queries, keys, keys), (heads[0], heads[1], heads[1]))
    exact = [torch.randn(sum(n), h, DIM, dtype=torch.float64, requires_grad=True) for n, h in sizes]
    bounds = [[0, *itertools.accumulate(n)] for n in (queries, keys)]
    want = by_hand(*exact, *bounds, window)
    drawn = [x.detach().float().requires_grad_() for x in exact]
    cu_seq = [torch.tensor(ends, dtype=torch.int32) for ends in bounds]
    settings = dict(scale=0.3, window_size=window, return_aux=load_varlen().AuxRequest(lse=True))
    lengths = dict(cu_seq_q=cu_seq[0], cu_seq_k=cu_seq[1], max_q=max(queries), max_k=max(keys))
    got, log_sum = call_varlen(*drawn, **lengths, **settings)
    assert torch.allclose(got.double(), want, atol=1e-6) and log_sum.shape == (heads[0], sum(queries))
    weight = torch.randn_like(want)
    gradients = torch.autograd.grad((got * weight).sum(), drawn), torch.autograd.grad((want * weight).sum(), exact)
    assert all(torch.allclose(a.double(), b, atol=2e-6) for a, b in zip(*gradients))


def test_the_log_of_the_sum_is_what_a_uniform_query_gets():
    query = torch.zeros(8, HEADS, DIM, dtype=torch.bfloat16)
    _, log_sum = attend(query=query, return_aux=load_varlen().AuxRequest(lse=True))
    assert torch.allclose(log_sum[0].exp(), torch.tensor([1.0, 2, 3, 1, 2, 3, 4, 5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(dtype):
    """The sums are in fp32, as on the device: half a unit in the last place from the definition."""
    arguments = make_example_call(dtype=dtype)
    tensors = [arguments.pop(name).requires_grad_() for name in ("query", "key", "value")]
    out = call_varlen(*tensors, **arguments)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    factor = arguments["scale"] / 0.3
    want = by_hand(exact[0] * factor, *exact[1:], [0, 3, 8], [0, 3, 8], (-1, 0))
    assert out.dtype == dtype and torch.allclose(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    out.double().sum().backward()
    assert all(x.grad.dtype == dtype and x.shape[1] in (HEADS, KEY_HEADS) for x in tensors)
