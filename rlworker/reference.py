"""HuggingFace's own computation, one sequence at a time in fp32: what layouts and masks must not change."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.batch import TrainBatch
from engines.interfaces import LossFn, TokenOutputs


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
    folder: str, batch: TrainBatch, loss: LossFn, denominator: float, temperature: float
) -> Reference:
    """The reference of a batch for the model in a HuggingFace folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    states: dict[int, list[Tensor]] = {}

    def keep(number: int):
        def hook(_, __, output):
            hidden = output[0] if isinstance(output, tuple) else output
            states.setdefault(number, []).append(hidden.detach()[0])

        return hook

    for number, layer in enumerate(model.model.layers, start=1):
        layer.register_forward_hook(keep(number))
    parts, total = [], torch.zeros(())
    for i in range(len(batch)):
        one = batch.select(i, i + 1)
        if not one.num_tokens:
            continue
        log_p = (model(one.inputs[None]).logits[0] / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        parts.append(TokenOutputs(log_p.gather(-1, one.targets[:, None])[:, 0], entropy))
        total = total + loss(parts[-1], one)[0]
    (total / denominator).backward()
    return Reference(
        torch.cat([part.logprobs for part in parts]).detach(),
        torch.cat([part.entropy for part in parts]).detach(),
        {number: torch.cat(hidden) for number, hidden in states.items()},
        {name: parameter.grad for name, parameter in model.named_parameters()},
    )
