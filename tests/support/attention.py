"""Inputs of an attention function, and what a call that breaks a kernel's requirement raises."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager

import pytest
import torch

from hardware.attention.contract import RefusedError, Requirement, SilentError
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS


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
