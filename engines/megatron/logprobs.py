"""Log-probability and entropy of targets from hidden states, without holding the logits of all tokens at once.

The output projection belongs to it: logits are made for some tokens at a time, over this rank's columns of the
vocabulary, and made again for the backward pass, which turns their gradient into those of hidden states and weight
before it makes the next. Logits of few tokens are kept instead.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from engines.batch.shard import TokenOutputs

_NEVER = -1e30
"""Logit of a token that is never sampled: its probability is 0, and unlike -inf 0 times it is 0."""
_LOGITS_AT_ONCE = 2**25
"""Logits in one chunk of tokens (128 MiB in fp32)."""


class _VocabParallelHead(torch.autograd.Function):
    """``(logprob, entropy)`` of hidden states ``[n, h]`` and weight ``[v / tp, h]``.

    For ``p = softmax(z)``: ``d logprob / dz = onehot - p`` and ``d entropy / dz = -p * (log p + entropy)``. Each rank's
    gradient of the hidden states is that of its own columns; whoever gathered them adds the ranks up.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, target: Tensor, scale: float, first: int, banned, keep: bool, group
    ):
        local = (target >= first) & (target < first + len(weight))
        column = torch.where(local, target - first, 0)[:, None]
        top, total, moment, chosen = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        ctx.kept = []
        ctx.set_materialize_grads(False)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, scale, banned)
            chosen[rows] = logits.gather(-1, column[rows])[:, 0]
            top[rows] = logits.amax(dim=-1)
            shifted = logits - top[rows, None]
            exp = shifted.exp()
            total[rows] = exp.sum(-1)
            moment[rows] = torch.linalg.vecdot(exp, shifted)
            if keep:
                ctx.kept.append(logits)
        highest, chosen, total, moment = _over_ranks(top, chosen.masked_fill(~local, 0.0), total, moment, local, group)
        log_total = total.log()
        entropy = log_total - moment / total
        log_sum = highest + log_total
        ctx.scale, ctx.banned = scale, banned
        ctx.save_for_backward(hidden, weight, local, column, log_sum, entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, d_logprob: Tensor | None, d_entropy: Tensor | None):
        hidden, weight, local, column, log_sum, entropy = ctx.saved_tensors
        d_logprob = torch.zeros_like(entropy) if d_logprob is None else d_logprob
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        kept = ctx.kept[::-1]
        ctx.kept = []
        for rows in _chunks(len(hidden), len(weight)):
            logits = kept.pop() if kept else _logits(hidden[rows], weight, ctx.scale, ctx.banned)
            log_softmax = logits.sub_(log_sum[rows, None])
            gradient = log_softmax.exp()
            if d_entropy is not None:
                log_softmax.add_(entropy[rows, None]).mul_(d_entropy[rows, None]).add_(d_logprob[rows, None])
                gradient.mul_(log_softmax.neg_())
            else:
                gradient.mul_(-d_logprob[rows, None])
            gradient.scatter_add_(-1, column[rows], (d_logprob * local)[rows, None])
            gradient = gradient.mul_(ctx.scale).to(weight.dtype)
            d_hidden[rows] = gradient @ weight
            if d_weight is not None:
                _add_product(d_weight, gradient, hidden[rows])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 6


def _chunks(tokens: int, width: int) -> Iterator[slice]:
    size = max(1, _LOGITS_AT_ONCE // width)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _logits(hidden: Tensor, weight: Tensor, scale: float, banned: list[int]) -> Tensor:
    logits = (hidden @ weight.T).float()
    if banned:
        logits[:, banned] = _NEVER
    return logits if scale == 1.0 else logits.mul_(scale)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``total += gradient.T @ hidden``, added up in fp32."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
    else:
        total += gradient.T @ hidden


def _over_ranks(top: Tensor, chosen: Tensor, total: Tensor, moment: Tensor, local: Tensor, group):
    """Each rank's sums, of logits shifted by its own largest one, added up as if shifted by the largest of all."""
    if group.size() == 1:
        return top, chosen - top, total, moment
    highest = top.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    lower = top - highest
    factor = lower.exp()
    sums = torch.stack([torch.where(local, chosen - highest, 0.0), total * factor, factor * (moment + lower * total)])
    dist.all_reduce(sums, group=group)
    return highest, *sums.unbind()


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    vocab: int,
    group,
    banned: tuple[int, ...] = (),
    keep_logits: bool | None = None,
) -> TokenOutputs:
    """Outputs of ``n`` tokens, the same on every rank of the group.

    Args:
        hidden: ``[n, h]``, the last hidden states. weight: ``[v / tp, h]``, this rank's rows of the output layer.
        target: ``[n]`` long.
        temperature: divides the logits, as the sampler does.
        vocab: real size of the vocabulary; rows past it are padding and get no probability.
        banned: ids that are never sampled: they get no probability, and as a target the logprob 0.
        keep_logits: keep them for the backward pass; None does where they are a single chunk.
        group: the tensor-parallel group.

    Returns:
        ``TokenOutputs`` of shape ``[n]``, in fp32.
    """
    first = group.rank() * len(weight)
    real = weight if first + len(weight) <= vocab else weight[: vocab - first]
    if keep_logits is None:
        keep_logits = len(hidden) * len(weight) <= _LOGITS_AT_ONCE
    keep = keep_logits and torch.is_grad_enabled()
    columns = [token - first for token in banned if first <= token < first + len(real)]
    head = _VocabParallelHead.apply(hidden, real, target, 1 / temperature, first, columns, keep, group)
    outputs = TokenOutputs(*head)
    if not banned:
        return outputs
    is_banned = torch.isin(target, torch.tensor(banned, device=target.device))
    return TokenOutputs(outputs.logprobs.masked_fill(is_banned, 0.0), outputs.entropy)
