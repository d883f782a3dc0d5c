"""HuggingFace's computation, one sequence at a time, so that there is nothing to pad, pack or split.

``rlworker.checks.reference.ensemble`` makes the numbers of it that engines are compared with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from engines.images.processor import ImageProcessor
from engines.images.video import Video
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.states import hiding_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 64
"""Number of rows from which on a linear layer is computed by the kernel of many rows."""
Arguments = Callable[[TrainBatch], dict[str, Tensor]]
"""A function of a sequence that returns the arguments for transformers' forward in addition to the ids."""


def compare_outputs(a: TokenOutputs, b: TokenOutputs) -> dict[str, float]:
    """Compare outputs of the same tokens, in nats.

    Returns:
        ``logprob`` and ``entropy``, each with `` mean``, `` p99`` (the 99th percentile) and `` max`` of the absolute
            differences; NaN if a value is NaN or the numbers of tokens differ.
    """
    differences = {}
    for name, x, y in (("logprob", a.logprobs, b.logprobs), ("entropy", a.entropy, b.entropy)):
        apart = torch.full((1,), torch.nan, dtype=torch.float64)
        if x.shape == y.shape:
            apart = (x.double() - y.double()).abs()
        differences[f"{name} mean"] = float(apart.mean())
        differences[f"{name} p99"] = float(apart.quantile(0.99))
        differences[f"{name} max"] = float(apart.max())
    return differences


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


class ManyRows(TorchFunctionMode):
    """Gives linear layers at least ``_ROWS`` rows in this context: appends zeros, and drops their products.

    A processor multiplies many rows by other kernels than a few, which sum in another order. HuggingFace computes one
    sequence at a time, an engine many together.
    """

    def __torch_function__(self, func, types, args: tuple = (), kwargs: dict | None = None):
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        states, *weights = args
        rows = states.reshape(-1, states.shape[-1])
        missing = max(0, _ROWS - len(rows))
        products = func(torch.nn.functional.pad(rows, (0, 0, 0, missing)), *weights, **(kwargs or {}))
        return products[: len(rows)].reshape(*states.shape[:-1], products.shape[-1])


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
    """Overwrite each weight of a model by ``round_otherwise``.

    A model whose weights were rounded otherwise is as right as the model itself. What its outputs differ by is what
    rounding does to them on this machine.

    Args:
        seed: of the draw; one seed moves the weights alike everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(round_otherwise(parameter, generator))


def round_otherwise(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return values w (1 + d) in their own type, d drawn from -eps/2 to eps/2: moved by at most half a last digit."""
    share = torch.rand(values.shape, generator=generator, dtype=torch.float64) - 0.5
    # In float64: 1 + d in the values' own type would round most moves away.
    return (values.double() * (1 + torch.finfo(values.dtype).eps * share)).to(values.dtype)


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


def open_images(spec: ModelSpec, batch: TrainBatch, dtype: torch.dtype) -> Arguments:
    """Open a batch's images now, and return a function that gives each sequence its own, in turn, again and again.

    Args:
        dtype: of the pixels. Opened within ``computing_in_double``, some would be rounded to other whole numbers.
    """
    make_arguments = make_image_arguments(spec)
    opened: list[dict[str, Tensor]] = []
    for number in range(len(batch)):
        sequence = batch.select(number, number + 1)
        if sequence.num_tokens:
            inputs = make_arguments(sequence)
            opened.append({name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()})
    turns = cycle(opened)
    return lambda sequence: next(turns)
