"""A model whose modules round their outputs otherwise, to see what rounding alone does to its numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from engines.batch.batch import TrainBatch
from engines.megatron.engine import MegatronEngine
from engines.probes.outputs import compute_outputs

_DRAWS = 4
"""Number of passes of ``measure_rounding`` that round otherwise."""


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


def measure_rounding(engine: MegatronEngine, batch: TrainBatch) -> float | None:
    """Measure how far rounding alone moves the logprobs of a batch that every replica computes; None but on leaders.

    Returns:
        the mean |difference| in nats of the counting tokens between a plain pass and a pass in which each module rounds
            otherwise: the largest of ``_DRAWS`` such passes.
    """
    layout = engine.config.layout
    plain = compute_outputs(engine, layout, batch)
    means = []
    for seed in range(_DRAWS):
        with rounding_otherwise(engine.device, engine.config.dtype, seed):
            moved = compute_outputs(engine, layout, batch)
        if plain is not None and moved is not None:
            difference = (moved.logprobs.double() - plain.logprobs.double()).abs()
            means.append(float(difference[batch.mask].mean()))
    return float(np.max(means)) if means else None
