"""HuggingFace's computation, one sequence at a time: the reference for layouts, masks and parallel sizes.

``rlworker check`` and the tests compare the engines with it. ``tests/rlworker/checks/test_reference.py`` compares it in
turn with transformers' own loss, one label at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, join_outputs
from engines.config import LoraConfig
from engines.images.processor import ImageProcessor
from engines.images.video import Video
from engines.interfaces import LossFn
from engines.models.adapters import ExpertAdapter, name_in_peft
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.states import hiding_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Arguments = Callable[[TrainBatch], dict[str, Tensor]]
"""A function of a sequence that returns the arguments for transformers' forward in addition to the ids."""

_SCORES_AT_ONCE = 2**25
"""Number of logits that are scored together; scoring takes several times their memory."""
_LEAST_NORM = 1e-3
"""Share of the largest gradient's norm by which a tensor's difference is at least divided: softmax ignores a bias that
all keys share, so that its gradient is rounding alone."""


@dataclass(frozen=True)
class Rounding:
    """The rounding error of HuggingFace's own model in the engine's dtype: its distance from the float64 reference.

    Attributes:
        outputs: result of ``Reference.compare_outputs``.
        hidden: layer number -> result of ``Reference.compare_hidden``.
        gradient: largest result of ``Reference.compare_gradient``.
    """

    outputs: dict[str, float]
    hidden: dict[int, float]
    gradient: float


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

    @cached_property
    def _least_norm(self) -> float:
        return max(_LEAST_NORM * max(float(gradient.norm()) for gradient in self.gradients.values()), 1e-12)


def compare_outputs(a: TokenOutputs, b: TokenOutputs) -> dict[str, float]:
    """Compare outputs of the same tokens, in nats.

    Returns:
        ``logprob mean``, ``logprob max``, ``entropy mean`` and ``entropy max`` of the absolute differences; NaN where a
            value is NaN or the numbers of tokens differ.
    """
    found = {}
    for name, x, y in (("logprob", a.logprobs, b.logprobs), ("entropy", a.entropy, b.entropy)):
        apart = (x.double() - y.double()).abs() if x.shape == y.shape else torch.tensor([torch.nan])
        found |= {f"{name} mean": float(apart.mean()), f"{name} max": float(apart.max())}
    return found


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
        dtype: the engine's dtype, in which HuggingFace computes a second time for ``Reference.rounding``.
        tell: is called with a line of text at the start of each pass.
        lora: adapters of ``LoraConfig.make_values``, of which alone the gradients are; None has none.
    """

    def compute(dtype: torch.dtype) -> Reference:
        tell(f"HuggingFace, {dtype}".replace("torch.", ""))
        return _compute_in(dtype, spec, batch, loss, denominator, temperature, lora)

    # At the peak: weights, their gradients, the logits of a sequence, and their scoring.
    weights, logits = spec.count_weights(), max(batch.lengths) * spec.vocab
    need = 8 * (2 * weights + 4 * logits + 6 * min(logits, _SCORES_AT_ONCE)) + 2**30
    have = psutil.virtual_memory().available
    if need > have:
        tell(f"float64 needs {need / 2**30:.1f} GiB and {have / 2**30:.1f} are free: limits are estimated")
        return compute(torch.float32)
    truth, own = compute(torch.float64), compute(dtype)
    rounding = Rounding(
        truth.compare_outputs(TokenOutputs(own.logprobs, own.entropy)),
        {number: truth.compare_hidden(number, states) for number, states in own.hidden.items()},
        max(truth.compare_gradient(name, gradient) for name, gradient in own.gradients.items()),
    )
    return replace(truth, rounding=rounding)


def _compute_in(
    dtype: torch.dtype,
    spec: ModelSpec,
    batch: TrainBatch,
    loss: LossFn,
    denominator: float,
    temperature: float,
    lora: LoraConfig | None,
) -> Reference:
    """Compute the numbers of a batch by HuggingFace's model in a type; a sequence's logits are in memory at a time."""
    drawn = lora.make_values(spec) if lora else {}  # in float32 at all types
    with computing_in_double() if dtype == torch.float64 else nullcontext():
        model = load_huggingface(spec, dtype)
        if lora:
            _merge_adapters(model, spec, drawn, lora)
        states = _keep_hidden_states(model.model.language_model if spec.vision else model.model)
        rows, outputs = max(1, _SCORES_AT_ONCE // spec.vocab), []
        for one, logits in iterate_logits(model, batch, make_image_arguments(spec)):
            parts = [
                checkpoint(score_tokens, *part, spec.banned_tokens, temperature, use_reentrant=False)
                for part in zip(logits.split(rows), one.targets.split(rows))
            ]
            outputs.append(join_outputs(parts))
            (loss(outputs[-1], one)[0] / denominator).backward()
    joined = join_outputs([replace(o, logprobs=o.logprobs.detach(), entropy=o.entropy.detach()) for o in outputs])
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients |= spec.split_parameter(name, parameter.grad.float())
            parameter.grad = None
    if lora:
        gradients = _differentiate_adapters(spec, drawn, gradients, lora)
    hidden = {number: torch.cat(parts).float() for number, parts in states.items()}
    return Reference(joined.logprobs, joined.entropy, hidden, gradients)


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


class _Doubling(TorchFunctionMode):
    """Replaces float32 by float64 wherever code names it to torch."""

    def __torch_function__(self, func, types, args: tuple = (), kwargs: dict | None = None):
        swap = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        call: Callable = Tensor.double if func is Tensor.float else func
        return call(*map(swap, args), **{name: swap(value) for name, value in (kwargs or {}).items()})


@contextmanager
def computing_in_double() -> Iterator[None]:
    """Compute everything in float64 in this context: transformers casts norms, rotation and softmax to float32."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubling():
            yield
    finally:
        torch.set_default_dtype(previous)


@hiding_kernels()
def load_huggingface(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Load transformers' model from a folder, with eager attention, which forms every weight ``[b, h, s, s]``, and
    experts one after another."""
    import transformers

    model_class = getattr(transformers, spec.architecture)
    plain = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if spec.experts else {})
    return model_class.from_pretrained(spec.folder, dtype=dtype, **plain)


@torch.no_grad()
def perturb_weights(model: "PreTrainedModel", seed: int) -> None:
    """Overwrite each weight w by w (1 + d), d drawn from -eps/2 to eps/2: at most half a last digit of its type.

    A model whose weights were rounded otherwise is as right as the model itself. What its outputs differ by is what
    rounding does to them on this machine.

    Args:
        seed: of the draw; one seed moves the weights alike everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        half_digit = torch.finfo(parameter.dtype).eps / 2
        # In float64: 1 + d in the weights' own type would round most moves away.
        share = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
        parameter.copy_(parameter.double() * (1 + half_digit * share))


def iterate_logits(
    model: "PreTrainedModel", batch: TrainBatch, arguments: Arguments = lambda one: {}
) -> Iterator[tuple[TrainBatch, Tensor]]:
    """Run a model on one sequence at a time, so that there is nothing to pad, pack or split.

    Args:
        arguments: returns the image arguments of a sequence.

    Yields:
        each sequence that has an input, as a batch, and its logits ``[n, vocab]``, or ``[n, 1]`` for a critic.
    """
    for i in range(len(batch)):
        one = batch.select(i, i + 1)
        if one.num_tokens:
            yield one, model(one.inputs[None], **arguments(one)).logits[0]


def score_tokens(
    logits: Tensor, targets: Tensor, banned: tuple[int, ...] = (), temperature: float = 1.0
) -> TokenOutputs:
    """Return logprobs and entropies ``[n]`` by ``softmax(logits / temperature)`` over the tokens that are not banned.

    A banned target has logprob 0, as in the engines, since it never counts. The result is float32, or float64 for
    float64 logits.

    Args:
        logits: ``[n, vocab]``. targets: ``[n]`` ids. banned: ids that have no probability.
    """
    never = torch.tensor(banned, dtype=torch.long)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    scores = scores.index_fill(-1, never, -1e30)
    # log_softmax in fp32 on a CPU adds exp() up in one number a lane: of a large vocabulary it loses the small terms.
    # Shifted by the largest first, large logits are rounded no further.
    scores = scores - scores.detach().amax(-1, keepdim=True)
    log_p = scores - scores.logsumexp(-1, keepdim=True)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    return TokenOutputs(
        logprobs=logprobs.masked_fill(torch.isin(targets, never), 0.0),
        entropy=-(log_p.exp() * log_p).sum(-1),
    )


def probe_loss(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum ``-(advantage * logprob + 0.1 * entropy)`` over counting tokens, so that all gradients differ."""
    terms = -(batch.require_column("advantages") * outputs.logprobs + 0.1 * outputs.entropy) * batch.mask
    return terms.sum(), {"loss": terms.sum().detach()}


def make_image_arguments(spec: ModelSpec) -> Arguments:
    """Return a function that makes the image arguments of a sequence for transformers; empty without vision."""
    if not (vision := spec.vision):
        return lambda one: {}
    processor, by_rule = ImageProcessor(spec.folder, vision), any(rule.images for rule in spec.rules)

    def arguments(one: TrainBatch) -> dict[str, Tensor]:
        ids, images = one.inputs[None], one.images[0] if one.images else ()
        inputs = {"attention_mask": torch.ones_like(ids)}
        if by_rule or vision.axes:  # told where attention or positions depend on it
            kinds = sum((ids == token).int() * kind for kind, token in enumerate(vision.feature_tokens, start=1))
            inputs["token_type_ids" if by_rule else "mm_token_type_ids"] = cast(Tensor, kinds)
        videos = [image for image in images if isinstance(image, Video)]
        stills = [image for image in images if not isinstance(image, Video)]
        for shown, pixels, grid in (
            (stills, "pixel_values", "image_grid_thw"),
            (videos, "pixel_values_videos", "video_grid_thw"),
        ):
            if shown:
                patches = torch.cat([processor.patches([image]) for image in shown])
                inputs[pixels] = patches.to(torch.get_default_dtype())
            if shown and vision.axes:
                inputs[grid] = torch.tensor([image.grid for image in shown])
        return inputs

    return arguments


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
