"""Hidden states of vLLM's layers, as its model computes them for a prompt."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engines.batch.samples import Request, Sampling

if TYPE_CHECKING:
    from engines.vllm.engine import VllmEngine

_SCORING = Sampling(1, 1.0, 1, (), (), scores_prompt=True)


class StateHooks:
    """Keeps the output of each decoder layer of a vLLM model, in the order of its forward passes.

    Args:
        layers: number of decoder layers, by which their list is told from a vision tower's.
    """

    def __init__(self, model: torch.nn.Module, layers: int):
        self.states: dict[int, list[Tensor]] = {}
        lists = [
            module
            for name, module in model.named_modules()
            if name.endswith("layers") and "vis" not in name and isinstance(module, torch.nn.ModuleList)
        ]
        (found,) = [module for module in lists if len(module) == layers]
        self._hooks = [
            layer.register_forward_hook(lambda _, __, output, number=number: self._keep(number, output))
            for number, layer in enumerate(found, start=1)
        ]

    def _keep(self, number: int, output: Any) -> None:
        """Keep ``[tokens, hidden]``; vLLM adds the residual of a layer in the norm of the next."""
        hidden, residual = output if isinstance(output, tuple) else (output, None)
        total = hidden.float() if residual is None else hidden.float() + residual.float()
        self.states.setdefault(number, []).append(total.detach().cpu())

    def take(self) -> dict[int, Tensor]:
        """Remove the hooks; layer number -> ``[tokens, hidden]`` float32 of all forward passes."""
        for hook in self._hooks:
            hook.remove()
        return {number: torch.cat(parts) for number, parts in self.states.items()}


def score_states(
    engine: "VllmEngine", prompts: list[tuple[tuple[int, ...], tuple]]
) -> list[tuple[dict[int, Tensor], Tensor]]:
    """Score prompts one at a time, at temperature 1 and with no token banned.

    Args:
        prompts: ids and images of each.

    Returns:
        for each prompt, layer number -> ``[n, hidden]`` float32 of its ids but the last, and logprobs ``[n]`` of its
            ids from the second on.
    """
    scored = []
    for ids, images in prompts:
        engine.llm.collective_rpc("begin_states", args=(engine.model.layers,))
        try:
            (completion,) = engine.sample([Request(ids, _SCORING, images)], 0)
        finally:
            states = engine.llm.collective_rpc("take_states")[0]  # each worker has whole states
        cut = {number: each[: len(ids) - 1] for number, each in states.items()}
        scored.append((cut, torch.from_numpy(completion.logprobs.copy())))
    return scored
