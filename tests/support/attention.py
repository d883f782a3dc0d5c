"""Inputs of an attention function, what a call that breaks a kernel's requirement raises, and the gated delta rule."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from hardware.attention.contract import RefusedError, Requirement, SilentError
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS

EPSILON = 1e-6
"""Added to the squared norm of a query or key, as in transformers and FLA."""


def draw_qkv(b, s, seed=0):
    """Draw query, key and value ``[b, s, heads, DIM]``, which take gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, s, h, DIM, generator=generator, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS)]


@contextmanager
def refused_for(requirement: Requirement):
    """What is called within raises for this requirement, says where it is written and what a device does."""
    with pytest.raises((RefusedError, SilentError), match=f"emulated: {requirement.name} \\(") as raised:
        yield
    assert isinstance(raised.value, SilentError) == requirement.silent
    assert requirement.source.name in str(raised.value) and requirement.consequence in str(raised.value)


def check_refusals(
    requirements: Iterable[Requirement], examples: Mapping[str, tuple[dict, dict]], call: Callable[..., torch.Tensor]
) -> None:
    """Check that each requirement has its examples, of which the first call is refused for it and the second is not."""
    named = {requirement.name: requirement for requirement in requirements}
    assert list(examples) == list(named)
    for name, (wrong, right) in examples.items():
        with refused_for(named[name]):
            call(**wrong)
        assert call(**right).isfinite().all(), name


def step_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Apply the rule to one sequence token by token, as it is written: the oracle of ``hardware.attention.delta_rule``.

    It computes in the type of its arguments, which have ``[tokens]`` in the place of ``[chunks, C]``.
    """
    query, key = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (query, key))
    query, key = (x[:, :, None, :, None] for x in (query, key))  # [tokens, G, 1, dk, 1]
    query = query * query.shape[-2] ** -0.5
    state, outs = value.new_zeros(*value.shape[1:3], key.shape[-2], value.shape[-1]), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[..., None, None]
        change = (v - (state * k).sum(-2)) * b[..., None]
        state = state + k * change[..., None, :]
        outs.append((state * q).sum(-2))
    return torch.stack(outs)
