"""States that vLLM's model computes of given tokens, layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engines.batch.samples import Completion, Request

if TYPE_CHECKING:
    from engines.vllm.engine import VllmEngine
    from engines.vllm.worker import WeightSyncExtension

_MODULE = "engines.probes.vllm"


def record_states(engine: VllmEngine, requests: Sequence[Request]) -> list[tuple[dict[int, Tensor], Completion]]:
    """Score the ids of each request, and return the states with the scores.

    Args:
        requests: requests with ``Sampling.scores_prompt``; each is computed by itself.

    Returns:
        the states by stage, ``[ids, hidden]`` float32 each: 0 is the input of the first layer, and number n the output
            of layer n, with features of images that the model adds to it.
    """
    found = []
    for request in requests:
        engine.llm.collective_rpc("run_function", args=(f"{_MODULE}:begin_states",))
        (scores,) = engine.sample([request], seed=0)
        states = engine.llm.collective_rpc("run_function", args=(f"{_MODULE}:take_states",))[0]  # ranks have the same
        found.append(({stage: rows[: len(request.token_ids)] for stage, rows in states.items()}, scores))
    return found


def find_decoder(worker: WeightSyncExtension) -> Any:
    """Find the module with the layers of the language model, and the norm after them, of a worker of vLLM."""
    model: Any = worker.model_runner.get_model()
    return (model.get_language_model() if hasattr(model, "get_language_model") else model).model


def begin_states(worker: WeightSyncExtension) -> None:
    """Keep the states of all tokens that this worker computes, until ``take_states``."""
    decoder, states, handles = find_decoder(worker), {}, []

    def keep(stage: int, hidden: Tensor, residual: Tensor | None) -> None:
        # A layer leaves its last sum to the norm of the next. That norm rounds the sum to the model's type.
        rows = hidden if residual is None else hidden + residual
        states.setdefault(stage, []).append(rows.detach().clone().float().cpu())  # vLLM writes over its buffers

    def keep_input(layer: nn.Module, args: tuple, kwargs: dict, stage: int) -> None:
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments  # layers differ in their order
        keep(stage, given["hidden_states"], given.get("residual"))

    def keep_last(_, args: tuple, kwargs: dict) -> None:
        keep(len(decoder.layers), args[0], args[1] if len(args) > 1 else kwargs.get("residual"))

    for stage, layer in enumerate(decoder.layers):
        handles.append(layer.register_forward_pre_hook(partial(keep_input, stage=stage), with_kwargs=True))
    handles.append(decoder.norm.register_forward_pre_hook(keep_last, with_kwargs=True))
    worker.kept_states = states, handles


def take_states(worker: WeightSyncExtension) -> dict[int, Tensor]:
    """End ``begin_states``, and return the states of all tokens by stage, in the order in which they were computed."""
    states, handles = worker.kept_states
    for handle in handles:
        handle.remove()
    del worker.kept_states
    return {stage: torch.cat(parts) for stage, parts in states.items()}
