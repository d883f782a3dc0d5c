"""A model whose modules round their outputs otherwise, to see what rounding alone does to its numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook


@contextmanager
def rounding_otherwise(device: torch.device, dtype: str, seed: int) -> Iterator[None]:
    """Move the outputs of each module by up to one unit in their last place in this context, at random.

    Ranks that compute the same move it alike.

    Args:
        dtype: name of the type whose unit in the last place is taken.
        seed: of the numbers that are drawn.
    """
    generator = torch.Generator(device).manual_seed(seed)
    unit = torch.finfo(getattr(torch, dtype)).eps

    def move(states: Tensor) -> Tensor:
        drawn = torch.rand(states.shape, generator=generator, device=states.device)
        return (states.float() * (1 + unit * (2 * drawn - 1))).to(states.dtype)

    def round_otherwise(module: Any, _, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        is_part = not next(module.children(), None) or hasattr(module, "layer_number")
        if not is_part or not isinstance(first, Tensor) or not first.is_floating_point():
            return None
        return (move(first), *output[1:]) if isinstance(output, tuple) else move(first)

    hook = register_module_forward_hook(round_otherwise)
    try:
        yield
    finally:
        hook.remove()
