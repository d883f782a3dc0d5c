"""Logprobs by HuggingFace: of a batch, and of what a rollout engine has sampled.

The computation itself is ``rlworker.checks.reference.huggingface``, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from support.rollout_workers import Prompt
from support.rounding import SEEDS
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completion
from engines.batch.shard import TokenOutputs, join_outputs
from engines.config import OptimizerConfig
from engines.interfaces import LossFn
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import (
    Arguments,
    computing_in_double,
    iterate_logits,
    load_huggingface,
    make_image_arguments,
    perturb_weights,
    score_tokens,
)
from rlworker.data.rows import Row
from rlworker.rollouts.trajectory import to_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_folder(folder: str):
    return load_huggingface(ModelSpec.from_folder(folder))


@dataclass(frozen=True)
class ForwardPass:
    """A model's outputs for a batch; all of them can be differentiated.

    Attributes:
        logits: ``[N, vocab]``, as the model gives them. outputs: ``[N]`` each. loss: its sum over the batch.
    """

    logits: Tensor
    outputs: TokenOutputs
    loss: Tensor


def run_forward(
    model: PreTrainedModel,
    spec: ModelSpec,
    batch: TrainBatch,
    loss: LossFn,
    *,
    temperature: float = 1.0,
    arguments: Arguments | None = None,
    at_once: bool = False,
) -> ForwardPass:
    """Run a language model, and a loss on it, on one sequence after another.

    Args:
        spec: the model's. arguments: None gives each sequence its images, where the model sees them.
        at_once: runs all sequences of text padded to one length. It rounds as much, and takes a fraction of the time.
    """
    logits, outputs, total = [], [], torch.zeros(())
    if at_once:
        runs = [(batch, compute_padded_logits(model, batch))]
    else:
        runs = iterate_logits(model, batch, arguments or make_image_arguments(spec))
    for one, scores in runs:
        logits.append(scores)
        outputs.append(score_tokens(scores, one.targets, spec.banned_tokens, temperature))
        total = total + loss(outputs[-1], one)[0]
    return ForwardPass(torch.cat(logits), join_outputs(outputs), total)


def take_steps(
    run: Callable[[], ForwardPass], parameters: Iterable[Tensor], tokens: Tensor, optimizer: OptimizerConfig, steps: int
) -> Iterator[tuple[ForwardPass, Tensor]]:
    """Take steps of AdamW, and yield before each its forward pass and the norm of its gradients, which are in place.

    Args:
        tokens: how many count, by which the loss is divided.
    """
    parameters = list(parameters)
    adam = torch.optim.AdamW(parameters, optimizer.lr, eps=optimizer.adam_eps, weight_decay=optimizer.weight_decay)
    for _ in range(steps):
        found = run()
        adam.zero_grad()
        (found.loss / tokens).backward()
        yield found, torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_grad)
        adam.step()


def compute_padded_logits(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Compute the logits ``[N, vocab]`` of causal text, whose sequences are padded at their ends."""
    sequences = [ids for ids in batch.inputs.split(list(batch.lengths)) if len(ids)]
    logits = model(torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)).logits
    return torch.cat([row[: len(ids)] for row, ids in zip(logits, sequences, strict=True)])


def name_gradients(model: PreTrainedModel, spec: ModelSpec) -> dict[str, Tensor]:
    """Map the folder's names of weights to the gradients of the last backward pass, without a copy."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients |= spec.split_parameter(name, parameter.grad)
    return gradients


def name_weights(model: PreTrainedModel, spec: ModelSpec) -> dict[str, Tensor]:
    """Map the folder's names of weights and saved buffers to their values, without a copy."""
    parts = (spec.split_parameter(name, parameter.detach()) for name, parameter in model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in spec.buffers}
    return {name: tensor for part in parts for name, tensor in part.items()} | buffers


def list_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """List the weights of a tied text model, as they are sent to a rollout engine."""
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


@torch.no_grad()
def nudge(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """Change every weight as an optimizer step at the demos' rate does; returns the model."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(7e-4 * torch.randn_like(parameter).sign())
    return model


@torch.no_grad()
def move_weights(model: PreTrainedModel, spec: ModelSpec | None = None, scale: float = 0.01) -> PreTrainedModel:
    """Give a model other weights, and other saved buffers where ``spec`` names them; returns the model."""
    torch.manual_seed(3)
    for weight in name_weights(model, spec).values() if spec else model.parameters():
        weight.mul_(1.1).add_(scale * torch.randn_like(weight))
    return model


@torch.no_grad()
def compute_logprobs(model, batch: TrainBatch, temperature: float = 1.0, spec: ModelSpec | None = None) -> Tensor:
    """Compute the logprob of every target, ``[N]`` float32.

    Args:
        spec: of a model that sees images.
    """
    if spec is None:
        runs, banned = iterate_logits(model, batch), ()
    else:
        runs, banned = iterate_logits(model, batch, make_image_arguments(spec)), spec.banned_tokens
    return torch.cat([score_tokens(logits, part.targets, banned, temperature).logprobs for part, logits in runs])


def make_batch(prompts: Sequence[Prompt], completions: list[Completion], spec: ModelSpec | None = None) -> TrainBatch:
    """Lay sampled completions ``[P * count]`` behind their prompts; ``mask`` has the sampled tokens.

    Args:
        spec: of a model that sees images.
    """
    rows = [Row("", prompt.token_ids, "", {}, prompt.images) for prompt in prompts]
    return to_batch(rows, completions, [0.0] * len(completions), spec.vision if spec else None)


def measure_differences(
    model,
    prompts: Sequence[Prompt],
    completions: list[Completion],
    temperature: float = 1.0,
    spec: ModelSpec | None = None,
) -> Tensor:
    """Compare the logprobs that tokens were sampled with: ``|rollout - HuggingFace|`` of each sampled token."""
    batch = make_batch(prompts, completions, spec)
    return (batch.rollout_logprobs - compute_logprobs(model, batch, temperature, spec))[batch.mask].abs()


@torch.no_grad()
def measure_rounding_of_samples(
    model, prompts: Sequence[Prompt], completions: list[Completion], temperature: float = 1.0, spec=None
) -> Tensor:
    """Measure what rounding does here: ``|draw - truth|`` of each sampled token, of the draw that is furthest off.

    The truth is computed in float64, the draws in float32 from weights moved by half a last digit.
    """
    batch = make_batch(prompts, completions, spec)
    with computing_in_double():
        truth = compute_logprobs(deepcopy(model).double(), batch, temperature, spec)
    assert truth.dtype == torch.float64
    distances = []
    for seed in SEEDS:
        moved = deepcopy(model)
        perturb_weights(moved, seed)
        drawn = compute_logprobs(moved, batch, temperature, spec)
        distances.append((drawn - truth)[batch.mask].abs())
    return max(distances, key=lambda distance: float(distance.mean()))


def measure_versions(models: dict, prompts: Sequence[Prompt], completions: list[Completion], spec=None) -> dict:
    """Compare as ``measure_differences`` does, each token under the weights that it says it was sampled by.

    Args:
        models: by version. spec: of a model that sees images.

    Returns:
        the differences by version.
    """
    batch, found = make_batch(prompts, completions, spec), {}
    for version, model in models.items():
        chosen = batch.versions == version
        found[version] = (batch.rollout_logprobs - compute_logprobs(model, batch, spec=spec))[chosen].abs()
    assert sum(map(len, found.values())) == batch.mask.sum(), "every token has one of these versions"
    return found
