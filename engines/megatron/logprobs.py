"""Log-probability and entropy of targets from hidden states, and logprobs of further ids where they are asked for,
without holding the logits of all tokens at once.

The output projection belongs to it: logits are made for some tokens at a time, over this rank's columns of the
vocabulary, and made again for the backward pass, which turns their gradient into those of hidden states and weight
before it makes the next. Logits of a single chunk of tokens are kept instead. A frozen weight needs no logits in the
backward pass: the derivative of each logprob by its hidden state is a vector, which the forward pass computes.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engines.batch.shard import TokenOutputs
from hardware.megatron.kernel_memory import KernelMemory

_NEVER = -1e30
"""Logit of a token that is never sampled: its probability is 0, and unlike -inf 0 times it is 0."""
_LEAST = 1e-30
"""Least probability of all others together, next to the likeliest id's: that of no id has a finite logarithm too."""


class _VocabParallelHead(torch.autograd.Function):
    """Compute logprobs, entropies and top logprobs from hidden states ``[n, h]`` and a vocab-parallel weight.

    The weight is ``[v / tp, h]``. Outputs are ``(logprob, entropy, top)``: ``[n]`` float32, ``[n]`` float32 and
    ``[n, k + 1]``. ``top`` has the logprobs of ``top_ids [k, n]``, distinct for each token, and last the logprob of all
    other ids together. The probabilities of the other ids are summed, not computed as 1 minus the rest. Without
    ``top_ids`` it is None.

    For ``p = softmax(z)``: ``d logprob / dz = onehot - p`` and ``d entropy / dz = -p * (log p + entropy)``; for the
    other ids O together, ``d log p(O) / dz = p / p(O) - p`` in O and ``-p`` elsewhere. Each rank's gradient of the
    hidden states is that of its own columns; the backward of their gather sums the ranks.

    ``frozen`` means that the weight W takes no gradient and that ``top_ids`` is None. The forward pass then computes
    ``d logprob / d hidden = (1 - p(target)) W[target] - sum over other ids of p W``, ``[n, h]``, beside the logits.
    A loss that takes a gradient of the entropy has the logits made again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target, top_ids, support, scale, first_id, banned, keep, frozen, at_once, group):
        # An id's logit is on the one rank that has its column; others read column 0 and mask it out below.
        ids = target[None] if top_ids is None else torch.cat([target[None], top_ids])  # [1 + k, n]
        local = (ids >= first_id) & (ids < first_id + len(weight))
        column = torch.where(local, ids - first_id, 0)
        # [n] each, over this rank's columns: max z, sum exp(z - max), sum exp(z - max) (z - max), and the others' exp.
        highest_local, total, moment, others = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        logit = hidden.new_empty(ids.shape, dtype=torch.float32)  # z of the ids
        derivative = torch.empty_like(hidden if frozen else hidden[:0])
        excluded = slice(0, 1) if frozen else slice(1, None)  # the ids that ``others`` leaves out
        ctx.kept = []
        ctx.set_materialize_grads(False)
        for rows in _cut_chunks(len(hidden), len(weight), at_once):
            logits = _compute_logits(hidden[rows], weight, scale, banned)  # [rows, v / tp]
            _keep_support(logits, support, rows, first_id)
            logit[:, rows] = logits.gather(-1, column[:, rows].T).T
            highest_local[rows] = logits.amax(dim=-1)
            shifted = (logits.sub if keep else logits.sub_)(highest_local[rows, None])
            exp = shifted.exp()
            total[rows] = exp.sum(-1)
            moment[rows] = shifted.mul_(exp).sum(-1)
            if frozen or top_ids is not None:
                _take_out(exp, column[excluded, rows].T, local[excluded, rows].T)
                others[rows] = exp.sum(-1)
            if frozen:
                derivative[rows] = exp.to(weight.dtype) @ weight
            ctx.kept += [logits] if keep else []
            del logits, shifted, exp  # before the next chunk's are made
        sums = (total, moment, others) if frozen or top_ids is not None else (total, moment)
        highest, logit, (total, moment, *others) = _sum_over_ranks(highest_local, logit, sums, local, group)
        # Over all columns now: H = -sum p log p with log p = (z - max) - log_total, and p summing to 1.
        log_total = total.log()
        entropy = log_total - moment / total
        top = None
        if top_ids is not None:
            top = (torch.stack([*logit[1:], others[0].clamp_min(_LEAST).log()], -1) - log_total[:, None]).contiguous()
        if frozen:  # so far the sum of exp(z - max) W over this rank's other ids, with the largest z of this rank
            derivative.mul_((highest_local - highest).exp().div(total).neg_()[:, None])
            derivative.addcmul_(weight[column[0]], (others[0] / total * local[0]).to(weight.dtype)[:, None])
        ctx.scale, ctx.banned, ctx.first_id, ctx.at_once = scale, banned, first_id, at_once
        ctx.save_for_backward(hidden, weight, local, column, highest, total, entropy, top, support, derivative)
        return logit[0] - log_total, entropy, top  # logits are less the largest one by now

    @staticmethod
    def backward(ctx, d_logprob: Tensor | None, d_entropy: Tensor | None, d_top: Tensor | None):
        hidden, weight, local, column, highest, total, entropy, top, support, derivative = ctx.saved_tensors
        d_logprob = torch.zeros_like(entropy) if d_logprob is None else d_logprob
        if len(derivative) and d_entropy is None:
            d_hidden = torch.mul(derivative, (d_logprob * ctx.scale)[:, None], out=torch.empty_like(derivative))
            return d_hidden, *[None] * 11
        d_ids, p_weight, top_p_weight = _weigh_probabilities(d_logprob, d_entropy, d_top, entropy, top)
        # p = exp(z - max) / total, with the division in the weights. By exp(z - log sum exp) the rounding of a large
        # logarithm would scale all of a row's p.
        p_weight = p_weight / total
        top_p_weight = None if top_p_weight is None else top_p_weight / total[:, None]
        if d_entropy is not None:
            entropy_weight, log_shift = d_entropy / total, entropy - total.log()
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        chunks = ctx.kept[::-1]
        ctx.kept = []
        for rows in _cut_chunks(len(hidden), len(weight), ctx.at_once):
            # All [rows, v / tp] and in place, since logits are the largest tensors of the pass.
            if chunks:
                logits = chunks.pop()
            else:
                logits = _compute_logits(hidden[rows], weight, ctx.scale, ctx.banned)
                _keep_support(logits, support, rows, ctx.first_id)
            shifted = logits.sub_(highest[rows, None])
            gradient = shifted.exp()
            columns, here = (x[: len(d_ids), rows].T for x in (column, local))  # [rows, 1 + k]
            onehots = d_ids[:, rows].T * here
            if top_p_weight is not None:
                onehots[:, 1:] -= _take_out(gradient, columns[:, 1:], here[:, 1:]) * top_p_weight[rows]
            if d_entropy is not None:  # -p * (d_logprob + d_entropy * (log p + entropy)), log p = z - max - log total
                shifted.add_(log_shift[rows, None]).mul_(entropy_weight[rows, None]).add_(p_weight[rows, None])
                gradient.mul_(shifted.neg_())
            else:
                gradient.mul_(-p_weight[rows, None])
            gradient.scatter_add_(-1, columns, onehots)
            # Back through the scale: from here on the gradient of hidden @ weight.T.
            gradient = gradient.mul_(ctx.scale).to(weight.dtype)
            d_hidden[rows] = gradient @ weight
            if d_weight is not None:
                _add_product(d_weight, gradient, hidden[rows])
            del logits, shifted, gradient  # before the next chunk's are made
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 10


def _weigh_probabilities(d_logprob: Tensor, d_entropy: Tensor | None, d_top: Tensor | None, entropy: Tensor, top):
    """Weigh each ``-p`` of the gradient: ``(d_ids [1 + k, n], weight [n], weight of the top ids [n, k])``.

    The top ids have a weight of their own, since the others' is less ``d log p(O) / p(O)``: taking that from all and
    giving it back to these would leave a difference of large numbers.
    """
    if d_top is None:
        return d_logprob[None], d_logprob, None
    d_ids = torch.cat([d_logprob[None], d_top[:, :-1].T])
    every = d_ids.sum(0) + d_top[:, -1]
    top_weight = every[:, None].expand(-1, len(d_ids) - 1)
    if d_entropy is not None:
        top_weight = top_weight + d_entropy[:, None] * (top[:, :-1] + entropy[:, None])
    return d_ids, every - d_top[:, -1] / top[:, -1].exp(), top_weight


def _take_out(rows: Tensor, columns: Tensor, local: Tensor) -> Tensor:
    """Set the ``local`` columns among ``[n, k]`` of rows ``[n, v / tp]`` to 0 and return their old values ``[n, k]``;
    for other columns 0."""
    taken = rows.gather(-1, columns) * local
    rows.scatter_add_(-1, columns, -taken)  # x - x is 0 exactly, and the columns of other ranks' ids lose nothing
    return taken


def _cut_chunks(tokens: int, width: int, at_once: int) -> Iterator[slice]:
    """Cut tokens into chunks of ``at_once`` logits, over ``width`` columns each."""
    size = max(1, at_once // width)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _compute_logits(hidden: Tensor, weight: Tensor, scale: float, banned: list[int]) -> Tensor:
    """Multiply ``[rows, h]`` with ``[v / tp, h]``: ``[rows, v / tp]`` in fp32, of memory of its own."""
    logits = (hidden @ weight.T).float()
    if banned:
        logits[:, banned] = _NEVER
    return logits if scale == 1.0 else logits.mul_(scale)


def _keep_support(logits: Tensor, support: Tensor | None, rows: slice, first_id: int) -> None:
    """Set the logits ``[rows, v / tp]`` of all ids but those of ``support [n, k]`` to ``_NEVER``, in place; a row
    without ids, all -1, keeps all. Other ids stay as they are bit by bit."""
    if support is None:
        return
    ids = support[rows].long()
    local = (ids >= first_id) & (ids < first_id + logits.shape[-1])
    columns = torch.where(local, ids - first_id, 0)  # several entries may mean column 0: the largest of them counts
    kept = torch.where(local, logits.gather(-1, columns), _NEVER)
    logits.masked_fill_((ids >= 0).any(-1, keepdim=True), _NEVER)
    logits.scatter_reduce_(-1, columns, kept, "amax")


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add ``gradient.T @ hidden``, of ``[rows, v / tp]`` and ``[rows, h]``, to ``total`` ``[v / tp, h]`` in fp32."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
    else:
        total += gradient.T @ hidden


def _sum_over_ranks(highest_local: Tensor, logit: Tensor, sums: Sequence[Tensor], local: Tensor, group):
    """Sum over the ranks: total, moment and further sums of exp, ``[n]`` each, and the logits of ids ``[1 + k, n]``.

    A rank's sums are of logits shifted by the rank's largest logit; the results are shifted by the largest logit of
    all ranks. The logit of an id that no rank has is 0.
    """
    if group.size() == 1:
        return highest_local, torch.where(local, logit - highest_local, 0.0), sums
    # With m <= M the largest of a rank and of all: exp(z - M) = f exp(z - m) for f = exp(m - M), so that the moment
    # sum exp(z - M) (z - M) is f (moment + (m - M) total).
    highest = highest_local.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = highest_local - highest
    factor = shift.exp()
    total, moment, *others = sums
    shifted = torch.stack([total * factor, factor * (moment + shift * total), *(other * factor for other in others)])
    together = torch.cat([torch.where(local, logit - highest, 0.0), shifted])
    dist.all_reduce(together, group=group)
    return highest, together[: len(logit)], together[len(logit) :].unbind()


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    vocab: int,
    group,
    top_ids: Tensor | None = None,
    support: Tensor | None = None,
    banned: tuple[int, ...] = (),
    keep_logits: bool | None = None,
    at_once: int = KernelMemory.head_logits,
) -> TokenOutputs:
    """Score ``n`` targets: their log-probabilities and entropies in nats, the same on every rank of the group.

    Args:
        hidden: ``[n, h]``, the last hidden states. weight: ``[v / tp, h]``, this rank's rows of the output layer.
        target: ``[n]`` long.
        temperature: divides the logits, as the sampler does.
        vocab: real size of the vocabulary; rows past it are padding and get no probability.
        top_ids: ``[n, k]``, further ids to compute logprobs of, distinct for each token, -1 for none.
        support: ``[n, k]``, the ids that could be sampled, -1 for none: all others get no probability. Where all are
            -1, every id could be.
        banned: ids that are never sampled: they get no probability, and as a target the logprob 0.
        keep_logits: keep them for the backward pass, which a frozen weight does not need; None does where they are a
            single chunk.
        at_once: logits in one chunk of tokens. group: the tensor-parallel group.

    Returns:
        ``TokenOutputs`` of shape ``[n]``, in fp32; with ``top_ids`` their logprobs too.
    """
    first_id = group.rank() * len(weight)  # the id of this rank's first column
    # Padding is at the end of the vocabulary: without its rows nothing has to be masked.
    real_weight = weight if first_id + len(weight) <= vocab else weight[: vocab - first_id]
    if keep_logits is None:
        keep_logits = len(hidden) * len(weight) <= at_once
    learns = torch.is_grad_enabled()
    frozen = learns and hidden.requires_grad and not weight.requires_grad and top_ids is None
    keep = keep_logits and learns and not frozen
    banned_columns = [token - first_id for token in banned if first_id <= token < first_id + len(real_weight)]
    further = None if top_ids is None else top_ids.T.long()
    settings = 1 / temperature, first_id, banned_columns, keep, frozen, at_once, group
    logprobs, entropy, top = _VocabParallelHead.apply(hidden, real_weight, target, further, support, *settings)
    if top_ids is not None:
        top = top.masked_fill(torch.nn.functional.pad(top_ids < 0, (0, 1)), 0.0)  # the last column is that of others
    if banned:
        logprobs = logprobs.masked_fill(torch.isin(target, torch.tensor(banned, device=target.device)), 0.0)
    return TokenOutputs(logprobs, entropy, top)
