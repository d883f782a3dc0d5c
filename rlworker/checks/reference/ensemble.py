"""The numbers that engines are compared with, and how far rounding alone may take an engine from them.

HuggingFace computes a batch in float64, and several times in the engine's dtype, each time with weights that are
rounded otherwise. The largest of these distances from float64 is what rounding does on this machine; limits are
multiples of it. ``tests/rlworker/checks/test_reference.py`` compares the numbers with transformers' own loss, one label
at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, join_outputs
from engines.config import LoraConfig
from engines.interfaces import LossFn
from engines.models.adapters import ExpertAdapter, name_in_peft
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import (
    ManyRows,
    compare_outputs,
    computing_in_double,
    iterate_logits,
    load_huggingface,
    open_images,
    perturb_weights,
    score_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAWS = 4
"""Number of times that HuggingFace computes in the engine's dtype, each with other weights by ``perturb_weights``.
Every second time linear layers have ``ManyRows``, as in an engine that packs sequences."""
_SCORES_AT_ONCE = 2**25
"""Number of logits that are scored together; scoring takes several times their memory."""
_LEAST_NORM = 1e-3
"""Share of the largest gradient's norm by which a tensor's difference is at least divided: softmax ignores a bias that
all keys share, so that its gradient is rounding alone."""


@dataclass(frozen=True)
class Rounding:
    """The distance of HuggingFace's numbers in the engine's dtype from float64: the largest of all draws.

    Attributes:
        outputs: result of ``Reference.compare_outputs``.
        hidden: layer number -> result of ``Reference.compare_hidden``.
        gradient: largest result of ``Reference.compare_gradient``.
    """

    outputs: dict[str, float]
    hidden: dict[int, float]
    gradient: float

    def take_larger(self, other: "Rounding") -> "Rounding":
        """Return the larger of each number and the other's; NaN, below which nothing passes, is the larger."""
        return Rounding(
            outputs={name: float(np.maximum(value, other.outputs[name])) for name, value in self.outputs.items()},
            hidden={number: float(np.maximum(value, other.hidden[number])) for number, value in self.hidden.items()},
            gradient=float(np.maximum(self.gradient, other.gradient)),
        )


@dataclass(frozen=True)
class Reference:
    """Numbers of a batch without padding, packing or parallelism.

    Attributes:
        logprobs, entropy: ``[N]``, float64, or float32 where ``rounding`` is None.
        hidden: layer number, from 1 -> ``[N, hidden]`` float32, output of the layer.
        gradients: HF name -> gradient of ``sum(loss) / denominator``, float32.
        rounding: None where memory does not hold the model in float64; the numbers are then HuggingFace's in float32.
    """

    logprobs: Tensor
    entropy: Tensor
    hidden: dict[int, Tensor]
    gradients: dict[str, Tensor]
    rounding: Rounding | None = None

    def compare_outputs(self, outputs: TokenOutputs) -> dict[str, float]:
        """Compare an engine's outputs with the reference, by ``compare_outputs``."""
        return compare_outputs(outputs, TokenOutputs(self.logprobs, self.entropy))

    def compare_hidden(self, number: int, states: Tensor) -> float:
        """Return the largest difference of a layer's hidden states, relative to the norm of the token's state."""
        want = self.hidden[number]
        return float(((states.float() - want).norm(dim=1) / want.norm(dim=1)).max())

    def compare_gradient(self, name: str, gradient: Tensor) -> float:
        """Return the norm of a gradient's difference from the reference, relative to the norm of the reference."""
        want = self.gradients[name]
        return float((gradient.float() - want).norm() / want.norm().clamp(min=self._least_norm))

    def measure_distance(self, other: "Reference") -> Rounding:
        """Measure how far another computation of the same batch is from this one."""
        outputs = TokenOutputs(other.logprobs, other.entropy)
        return Rounding(
            outputs=self.compare_outputs(outputs),
            hidden={number: self.compare_hidden(number, states) for number, states in other.hidden.items()},
            gradient=float(
                np.max([self.compare_gradient(name, gradient) for name, gradient in other.gradients.items()])
            ),
        )

    @cached_property
    def _least_norm(self) -> float:
        return max(_LEAST_NORM * max(float(gradient.norm()) for gradient in self.gradients.values()), 1e-12)


def compute_reference(
    spec: ModelSpec,
    batch: TrainBatch,
    loss: LossFn,
    denominator: float,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    tell: Callable[[str], None] = lambda line: None,
    lora: LoraConfig | None = None,
) -> Reference:
    """Compute the float64 reference of a batch with HuggingFace's model, or a float32 one where memory is short.

    Args:
        spec: the model. batch: the batch. loss, denominator: the gradients are of ``sum(loss) / denominator``.
        temperature: the logits are divided by it.
        dtype: the engine's dtype, in which HuggingFace computes ``DRAWS`` times for ``Reference.rounding``.
        tell: is called with a line of text at the start of each pass.
        lora: adapters of ``LoraConfig.make_values``, of which alone the gradients are; None has none.
    """

    def compute(dtype: torch.dtype, draw: int | None = None) -> Reference:
        name = str(dtype).removeprefix("torch.")
        tell(f"HuggingFace, {name}" if draw is None else f"HuggingFace, {name}, draw {draw} of {DRAWS}")
        return _compute_in(
            dtype,
            spec=spec,
            batch=batch,
            loss=loss,
            denominator=denominator,
            temperature=temperature,
            lora=lora,
            seed=draw,
        )

    # At the peak: weights, their gradients, the logits of a sequence, and their scoring.
    weights = spec.count_weights()
    logits = max(batch.lengths) * spec.vocab
    need = 8 * (2 * weights + 4 * logits + 6 * min(logits, _SCORES_AT_ONCE)) + 2**30
    have = psutil.virtual_memory().available
    if need > have:
        tell(f"float64 needs {need / 2**30:.1f} GiB and {have / 2**30:.1f} are free: limits are estimated")
        return compute(torch.float32)

    truth = compute(torch.float64)
    rounding = truth.measure_distance(compute(dtype, draw=1))
    for draw in range(2, DRAWS + 1):
        rounding = rounding.take_larger(truth.measure_distance(compute(dtype, draw)))
    return replace(truth, rounding=rounding)


def _compute_in(
    dtype: torch.dtype,
    *,
    spec: ModelSpec,
    batch: TrainBatch,
    loss: LossFn,
    denominator: float,
    temperature: float,
    lora: LoraConfig | None,
    seed: int | None,
) -> Reference:
    """Compute the numbers of a batch by HuggingFace's model in a type; a sequence's logits are in memory at a time.

    Args:
        seed: of ``perturb_weights``; None leaves the weights as they are.
    """
    adapters = lora.make_values(spec) if lora else {}  # in float32 at all types
    images = open_images(spec, batch, dtype)
    with ExitStack() as how:
        if dtype == torch.float64:
            how.enter_context(computing_in_double())
        elif seed is not None and seed % 2 == 0:
            how.enter_context(ManyRows())
        model = load_huggingface(spec, dtype)
        if lora:
            _merge_adapters(model, spec, adapters, lora)
        if seed is not None:
            perturb_weights(model, seed)
        states = _keep_hidden_states(model.model.language_model if spec.vision else model.model)
        rows_at_once = max(1, _SCORES_AT_ONCE // spec.vocab)
        outputs = []
        for sequence, logits in iterate_logits(model, batch, images):
            parts = [
                checkpoint(score_tokens, *part, spec.banned_tokens, temperature, use_reentrant=False)
                for part in zip(logits.split(rows_at_once), sequence.targets.split(rows_at_once))
            ]
            scored = join_outputs(parts)
            (loss(scored, sequence)[0] / denominator).backward()
            outputs.append(replace(scored, logprobs=scored.logprobs.detach(), entropy=scored.entropy.detach()))
    joined = join_outputs(outputs)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients |= spec.split_parameter(name, parameter.grad.float())
            parameter.grad = None
    if lora:
        gradients = _differentiate_adapters(spec, adapters, gradients, lora)
    return Reference(
        logprobs=joined.logprobs,
        entropy=joined.entropy,
        hidden={number: torch.cat(parts).float() for number, parts in states.items()},
        gradients=gradients,
    )


@torch.no_grad()
def _merge_adapters(model: "PreTrainedModel", spec: ModelSpec, values: dict[str, Tensor], lora: LoraConfig) -> None:
    """Make the weights W of a model W + s B A, in its type."""
    parts: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts |= spec.split_parameter(name, parameter)
    for names, a, b in _pair_adapters(spec, values, lora):
        change = lora.scale * torch.einsum("eor,eri->eoi", b, a)
        for name, part in zip(names, change.reshape(len(names), *parts[names[0]].shape), strict=True):
            parts[name].copy_(parts[name].double() + part)


def _differentiate_adapters(
    spec: ModelSpec, values: dict[str, Tensor], gradients: dict[str, Tensor], lora: LoraConfig
) -> dict[str, Tensor]:
    """Compute gradients of A and B, by PEFT's names, from those of W + s B A: ``s B^T dW`` and ``s dW A^T``."""
    leaves = {name: value.double().requires_grad_() for name, value in values.items()}
    for names, a, b in _pair_adapters(spec, leaves, lora):
        whole = torch.stack([gradients[name] for name in names]).double()
        change = lora.scale * torch.einsum("eor,eri->eoi", b, a)
        change.backward(whole.view(change.shape))
    return {name: leaf.grad.float() for name, leaf in leaves.items() if leaf.grad is not None}


def _pair_adapters(
    spec: ModelSpec, values: dict[str, Tensor], lora: LoraConfig
) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """Yield each adapter in float64: its weights' names in a saved folder, A ``[e, r, in]`` and B ``[e, out, r]``.

    Where it is of routed experts, e is their number, else 1. PEFT has A of one expert after another, and of B all
    experts' columns of one rank after another.
    """
    for each in lora.list_adapters(spec):
        if isinstance(each, ExpertAdapter):
            count, rows, columns = each.shape
            a, b = (values[name].double() for name in each.tensors)
            b = b.view(rows, lora.rank, count).permute(2, 0, 1)
            yield list(each.weight.tensors), a.view(count, lora.rank, columns), b
            continue
        for name in each.targets:
            a, b = (values[name_in_peft(spec, name, kind)].double()[None] for kind in "AB")
            yield [name], a, b


def _keep_hidden_states(language: Any) -> dict[int, list[Tensor]]:
    """Hook a decoder to collect the output of each layer for every later sequence: layer number, from 1 -> outputs."""
    states: dict[int, list[Tensor]] = {}

    def keep(number: int):
        def hook(_, args, kwargs):  # a layer's output, with features that are added to it
            hidden = args[0] if args else kwargs["hidden_states"]
            states.setdefault(number, []).append(hidden.detach()[0])

        return hook

    for number, then in enumerate([*language.layers[1:], language.norm], start=1):
        then.register_forward_pre_hook(keep(number), with_kwargs=True)
    return states
