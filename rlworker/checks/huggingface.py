"""HuggingFace's own computation, one sequence at a time: what layouts, masks and parallel sizes must not change.

``rlworker check`` and the tests compare the engines with it. It is itself compared with a second oracle, transformers'
own loss of one label at a time, in ``tests/rlworker/checks/test_reference.py``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, join_outputs
from engines.images.processor import ImageProcessor
from engines.images.video import Video
from engines.interfaces import LossFn
from engines.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Arguments = Callable[[TrainBatch], dict[str, Tensor]]
"""A function that makes the arguments that transformers' forward is given of a sequence beside its ids."""


@dataclass(frozen=True)
class Reference:
    """Numbers of a batch without padding, packing or parallelism.

    Attributes:
        logprobs, entropy: ``[N]`` float32.
        hidden: layer number, from 1 -> ``[N, hidden]``, what the layer gives out.
        gradients: HF name -> gradient of ``sum(loss) / denominator``.
    """

    logprobs: Tensor
    entropy: Tensor
    hidden: dict[int, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class ForwardPass:
    """A model's outputs for a batch; all of them can be differentiated.

    Attributes:
        logits: ``[N, vocab]``, as the model gives them. outputs: ``[N]`` each. loss: its sum over the batch.
    """

    logits: Tensor
    outputs: TokenOutputs
    loss: Tensor


def compute_reference(
    spec: ModelSpec, batch: TrainBatch, loss: LossFn, denominator: float, temperature: float
) -> Reference:
    """Compute the reference of a batch for a model, read from its HuggingFace folder."""
    model = load_huggingface(spec)
    states = _keep_hidden_states(model.model.language_model if spec.vision else model.model)
    result = run_forward(model, spec, batch, loss, temperature=temperature)
    (result.loss / denominator).backward()
    return Reference(
        result.outputs.logprobs.detach(),
        result.outputs.entropy.detach(),
        {number: torch.cat(hidden) for number, hidden in states.items()},
        name_gradients(model, spec),
    )


def load_huggingface(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Load transformers' own model from a folder, with attention that writes out every weight ``[b, h, s, s]``."""
    import transformers

    model_class = getattr(transformers, spec.architecture)
    return model_class.from_pretrained(spec.folder, dtype=dtype, attn_implementation="eager")


def run_forward(
    model: "PreTrainedModel",
    spec: ModelSpec,
    batch: TrainBatch,
    loss: LossFn,
    *,
    temperature: float = 1.0,
    arguments: Arguments | None = None,
) -> ForwardPass:
    """Run a language model, and a loss on it, on one sequence after another.

    Args:
        spec: the model's. arguments: None gives each sequence its images, where the model sees them.
    """
    logits, outputs, total = [], [], torch.zeros(())
    for one, scores in iterate_logits(model, batch, arguments or make_image_arguments(spec)):
        logits.append(scores)
        outputs.append(score_tokens(scores, one.targets, spec.banned_tokens, temperature))
        total = total + loss(outputs[-1], one)[0]
    return ForwardPass(torch.cat(logits), join_outputs(outputs), total)


def iterate_logits(
    model: "PreTrainedModel", batch: TrainBatch, arguments: Arguments = lambda one: {}
) -> Iterator[tuple[TrainBatch, Tensor]]:
    """Run a model on one sequence after another, so that there is nothing to pad, to pack or to split.

    Yields:
        each sequence that has an input, as a batch of its own, and its logits ``[n, vocab]``; of a critic ``[n, 1]``.
    """
    for i in range(len(batch)):
        one = batch.select(i, i + 1)
        if one.num_tokens:
            yield one, model(one.inputs[None], **arguments(one)).logits[0]


def score_tokens(
    logits: Tensor, targets: Tensor, banned: tuple[int, ...] = (), temperature: float = 1.0
) -> TokenOutputs:
    """Score targets ``[n]`` by ``softmax(logits / temperature)`` over the tokens that are not banned.

    A banned target has logprob 0, as in the engines: it never counts. In float32, of float64 logits in float64.
    """
    never = torch.tensor(banned, dtype=torch.long)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    scores = scores.index_fill(-1, never, -1e30)
    # log_softmax in fp32 on a CPU adds exp() up in one number a lane: of a large vocabulary it loses the small terms.
    log_p = scores - scores.logsumexp(-1, keepdim=True)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    return TokenOutputs(
        logprobs=logprobs.masked_fill(torch.isin(targets, never), 0.0),
        entropy=-(log_p.exp() * log_p).sum(-1),
    )


def probe_loss(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum ``-(advantage * logprob + 0.1 * entropy)`` over the tokens that count: its gradient differs at each."""
    terms = -(batch.require_column("advantages") * outputs.logprobs + 0.1 * outputs.entropy) * batch.mask
    return terms.sum(), {"loss": terms.sum().detach()}


def name_gradients(model: "PreTrainedModel", spec: ModelSpec) -> dict[str, Tensor]:
    """Name what the last backward pass left as the weights are named in the folder; nothing is copied."""
    parameters = model.named_parameters()
    return {spec.find_folder_name(name): p.grad for name, p in parameters if p.grad is not None}


def make_image_arguments(spec: ModelSpec) -> Arguments:
    """Make what gives each sequence its images; of a model without a vision tower, nothing."""
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
                inputs[pixels] = torch.cat([processor.patches([image]) for image in shown])
            if shown and vision.axes:
                inputs[grid] = torch.tensor([image.grid for image in shown])
        return inputs

    return arguments


def _keep_hidden_states(language: Any) -> dict[int, list[Tensor]]:
    """Watch a decoder: what each layer gives out of every sequence that is run from now on, by its number from 1."""
    states: dict[int, list[Tensor]] = {}

    def keep(number: int):
        def hook(_, args, kwargs):  # what goes on from a layer, with what is added to it on the way
            hidden = args[0] if args else kwargs["hidden_states"]
            states.setdefault(number, []).append(hidden.detach()[0])

        return hook

    for number, then in enumerate([*language.layers[1:], language.norm], start=1):
        then.register_forward_pre_hook(keep(number), with_kwargs=True)
    return states
