"""Log-probability and entropy from logits that are split over the vocabulary."""

import torch
import torch.distributed as dist
from torch import Tensor

from engines.interfaces import TokenOutputs


class _VocabParallelOutputs(torch.autograd.Function):
    """``(logprob, entropy)`` of vocabulary-split logits, with the softmax as the only saved activation.

    For ``p = softmax(z)``: ``d logprob / dz = onehot - p`` and ``d entropy / dz = -p * (log p + entropy)``.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, first: int, group) -> tuple[Tensor, Tensor]:
        top = logits.amax(dim=-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[..., None]
        local = (target >= first) & (target < first + logits.shape[-1])
        column = torch.where(local, target - first, 0)[..., None]
        chosen = shifted.gather(-1, column)[..., 0].masked_fill(~local, 0.0)
        weight = shifted.exp()
        # A padded column is -inf and has no weight; its product with zero would be NaN.
        moment = (weight * shifted.clamp_min(torch.finfo(shifted.dtype).min)).sum(-1)
        sums = torch.stack([chosen, weight.sum(-1), moment])
        dist.all_reduce(sums, group=group)
        chosen, total, moment = sums.unbind()
        log_total = total.log()
        softmax = weight.div_(total[..., None])
        entropy = log_total - moment / total
        ctx.save_for_backward(softmax, local, column, entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, d_logprob: Tensor, d_entropy: Tensor):
        softmax, local, column, entropy = ctx.saved_tensors
        gradient = softmax * -d_logprob[..., None]
        gradient.scatter_add_(-1, column, (d_logprob * local)[..., None])
        if d_entropy.any():
            log_softmax = softmax.clamp_min(torch.finfo(softmax.dtype).tiny).log()
            gradient -= softmax * (log_softmax + entropy[..., None]) * d_entropy[..., None]
        return gradient, None, None, None


def token_outputs(logits: Tensor, target: Tensor, *, temperature: float, vocab: int, group) -> TokenOutputs:
    """Outputs of every slot.

    Args:
        logits: ``[b, s, v / tp]``, this rank's columns of the vocabulary. target: ``[b, s]`` long.
        temperature: divides the logits, as the sampler does.
        vocab: real size of the vocabulary; columns past it are padding and get no probability.
        group: the tensor-parallel group.

    Returns:
        ``TokenOutputs`` of shape ``[b, s]``, in fp32.
    """
    scaled = logits.float() / temperature
    width = logits.shape[-1]
    first = group.rank() * width
    if first + width > vocab:
        padding = torch.arange(first, first + width, device=logits.device) >= vocab
        scaled = scaled.masked_fill(padding, float("-inf"))
    return TokenOutputs(*_VocabParallelOutputs.apply(scaled, target, first, group))
