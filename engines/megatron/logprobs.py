"""Log-probability and entropy of targets from hidden states, without holding the logits of all tokens at once.

The output projection belongs to it: logits are made for some tokens at a time, over this rank's columns of the
vocabulary, and made again for the backward pass, which turns their gradient into those of hidden states and weight
before it makes the next. Logits of a single chunk of tokens are kept instead.
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
    """Hidden states ``[n, h]`` and weight ``[v / tp, h]`` to ``(logprob, entropy)``, ``[n]`` float32 each.

    For ``p = softmax(z)``: ``d logprob / dz = onehot - p`` and ``d entropy / dz = -p * (log p + entropy)``. Each rank's
    gradient of the hidden states is that of its own columns; whoever gathered them adds the ranks up.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, target: Tensor, scale: float, first_id: int, banned, keep: bool, group
    ):
        # A target's logit is on the one rank that has its column; others read column 0 and mask it out below.
        local = (target >= first_id) & (target < first_id + len(weight))  # [n]
        column = torch.where(local, target - first_id, 0)[:, None]  # [n, 1]
        # [n] each, over this rank's columns: max z, sum exp(z - max), sum exp(z - max) (z - max), z of the target.
        highest_local, total, moment, target_logit = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        ctx.kept = []
        ctx.set_materialize_grads(False)
        for rows in _cut_chunks(len(hidden), len(weight)):
            logits = _compute_logits(hidden[rows], weight, scale, banned)  # [rows, v / tp]
            target_logit[rows] = logits.gather(-1, column[rows])[:, 0]
            highest_local[rows] = logits.amax(dim=-1)
            shifted = logits - highest_local[rows, None]
            exp = shifted.exp()
            total[rows] = exp.sum(-1)
            moment[rows] = torch.linalg.vecdot(exp, shifted)
            if keep:
                ctx.kept.append(logits)
        highest, target_logit, total, moment = _sum_over_ranks(
            highest_local, target_logit.masked_fill(~local, 0.0), total, moment, local, group
        )
        # Over all columns now: H = -sum p log p with log p = (z - max) - log_total, and p summing to 1.
        log_total = total.log()
        entropy = log_total - moment / total
        log_sum = highest + log_total
        ctx.scale, ctx.banned = scale, banned
        ctx.save_for_backward(hidden, weight, local, column, log_sum, entropy)
        return target_logit - log_total, entropy  # the target's logit is less the largest one by now

    @staticmethod
    def backward(ctx, d_logprob: Tensor | None, d_entropy: Tensor | None):
        hidden, weight, local, column, log_sum, entropy = ctx.saved_tensors
        d_logprob = torch.zeros_like(entropy) if d_logprob is None else d_logprob
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        chunks = ctx.kept[::-1]
        ctx.kept = []
        for rows in _cut_chunks(len(hidden), len(weight)):
            # All [rows, v / tp] and in place, since logits are the largest tensors of the pass.
            logits = chunks.pop() if chunks else _compute_logits(hidden[rows], weight, ctx.scale, ctx.banned)
            log_softmax = logits.sub_(log_sum[rows, None])
            gradient = log_softmax.exp()
            if d_entropy is not None:  # -p * (d_logprob + d_entropy * (log p + entropy))
                log_softmax.add_(entropy[rows, None]).mul_(d_entropy[rows, None]).add_(d_logprob[rows, None])
                gradient.mul_(log_softmax.neg_())
            else:
                gradient.mul_(-d_logprob[rows, None])
            gradient.scatter_add_(-1, column[rows], (d_logprob * local)[rows, None])  # the onehot
            # Back through the scale: from here on the gradient of hidden @ weight.T.
            gradient = gradient.mul_(ctx.scale).to(weight.dtype)
            d_hidden[rows] = gradient @ weight
            if d_weight is not None:
                _add_product(d_weight, gradient, hidden[rows])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 6


def _cut_chunks(tokens: int, width: int) -> Iterator[slice]:
    """Cut tokens into chunks of ``_LOGITS_AT_ONCE`` logits, over ``width`` columns each."""
    size = max(1, _LOGITS_AT_ONCE // width)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _compute_logits(hidden: Tensor, weight: Tensor, scale: float, banned: list[int]) -> Tensor:
    """Multiply ``[rows, h]`` with ``[v / tp, h]``: ``[rows, v / tp]`` in fp32, of memory of its own."""
    logits = (hidden @ weight.T).float()
    if banned:
        logits[:, banned] = _NEVER
    return logits if scale == 1.0 else logits.mul_(scale)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add ``gradient.T @ hidden``, of ``[rows, v / tp]`` and ``[rows, h]``, to ``total`` ``[v / tp, h]`` in fp32."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
    else:
        total += gradient.T @ hidden


def _sum_over_ranks(highest_local: Tensor, target_logit: Tensor, total: Tensor, moment: Tensor, local: Tensor, group):
    """Add up the ranks' sums, ``[n]`` each. Every rank's are of logits shifted by its own largest one, the result's are
    shifted by the largest of all, and so is the target's logit."""
    if group.size() == 1:
        return highest_local, target_logit - highest_local, total, moment
    # With m <= M the largest of a rank and of all: exp(z - M) = f exp(z - m) for f = exp(m - M), so that the moment
    # sum exp(z - M) (z - M) is f (moment + (m - M) total).
    highest = highest_local.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = highest_local - highest
    factor = shift.exp()
    sums = torch.stack(
        [torch.where(local, target_logit - highest, 0.0), total * factor, factor * (moment + shift * total)]
    )
    dist.all_reduce(sums, group=group)
    return highest, *sums.unbind()


def score_tokens(
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
    """Score ``n`` targets: their log-probabilities and entropies in nats, the same on every rank of the group.

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
    first_id = group.rank() * len(weight)  # the id of this rank's first column
    # Padding is at the end of the vocabulary: without its rows nothing has to be masked.
    real_weight = weight if first_id + len(weight) <= vocab else weight[: vocab - first_id]
    if keep_logits is None:
        keep_logits = len(hidden) * len(weight) <= _LOGITS_AT_ONCE
    keep = keep_logits and torch.is_grad_enabled()
    banned_columns = [token - first_id for token in banned if first_id <= token < first_id + len(real_weight)]
    head = _VocabParallelHead.apply(hidden, real_weight, target, 1 / temperature, first_id, banned_columns, keep, group)
    outputs = TokenOutputs(*head)
    if not banned:
        return outputs
    is_banned = torch.isin(target, torch.tensor(banned, device=target.device))
    return TokenOutputs(outputs.logprobs.masked_fill(is_banned, 0.0), outputs.entropy)
