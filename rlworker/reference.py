"""HuggingFace's own computation, one sequence at a time in fp32: what layouts and masks must not change."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.batch import TrainBatch
from engines.interfaces import LossFn, TokenOutputs
from engines.models import ModelSpec
from engines.pixels import ImageProcessor


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


def huggingface_reference(
    spec: ModelSpec, batch: TrainBatch, loss: LossFn, denominator: float, temperature: float
) -> Reference:
    """The reference of a batch for a model, read from its HuggingFace folder."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if spec.vision else AutoModelForCausalLM
    model = kind.from_pretrained(spec.folder, dtype=torch.float32, attn_implementation="eager")
    processor = ImageProcessor(spec.folder, spec.vision) if spec.vision else None
    states: dict[int, list[Tensor]] = {}

    def keep(number: int):
        def hook(_, args, kwargs):  # what goes on from a layer, with what is added to it on the way
            hidden = args[0] if args else kwargs["hidden_states"]
            states.setdefault(number, []).append(hidden.detach()[0])

        return hook

    language = model.model.language_model if spec.vision else model.model
    for number, then in enumerate([*language.layers[1:], language.norm], start=1):
        then.register_forward_pre_hook(keep(number), with_kwargs=True)
    parts, total = [], torch.zeros(())
    for i in range(len(batch)):
        one = batch.select(i, i + 1)
        if not one.num_tokens:
            continue
        logits = model(one.inputs[None], **_pictures(one, spec, processor)).logits[0] / temperature
        logits[:, list(spec.banned_tokens)] = -1e30
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        chosen = log_p.gather(-1, one.targets[:, None])[:, 0]
        is_banned = torch.isin(one.targets, torch.tensor(spec.banned_tokens, dtype=torch.long))
        parts.append(TokenOutputs(chosen.masked_fill(is_banned, 0.0), entropy))
        total = total + loss(parts[-1], one)[0]
    (total / denominator).backward()
    return Reference(
        torch.cat([part.logprobs for part in parts]).detach(),
        torch.cat([part.entropy for part in parts]).detach(),
        {number: torch.cat(hidden) for number, hidden in states.items()},
        {spec.name_in_folder(name): parameter.grad for name, parameter in model.named_parameters()},
    )


def _pictures(one: TrainBatch, spec: ModelSpec, processor: ImageProcessor | None) -> dict[str, Tensor]:
    """What HuggingFace's forward is given of a sequence beside its ids."""
    if processor is None:
        return {}
    given, images = {"mm_token_type_ids": (one.inputs[None] == spec.vision.image_token).int()}, one.images[0]
    if images:
        given["pixel_values"] = processor.patches(images)
        given["image_grid_thw"] = torch.tensor([image.grid for image in images])
    return given | {"attention_mask": torch.ones_like(one.inputs[None])}
