"""Losses: plain functions ``loss(outputs, batch) -> (sum over tokens, metric sums)``.

A policy loss has a surrogate (PPO's or another's), an aggregation (the weight of each token, which the trainer puts
into the batch's ``weights``), and optionally penalties and a correction for differences between rollout and trainer
logprobs. Shapes are ``[N]`` unless stated.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, ValueOutputs
from rlworker.config.algorithm import Level

Surrogate = Callable[[Tensor, Tensor, TrainBatch], tuple[Tensor, Tensor]]
"""``surrogate(logprobs, old_logprobs, batch) -> (loss of each token, whether its ratio was clipped)``."""
KlEstimate = Callable[[Tensor, Tensor], Tensor]
"""``estimate(logprobs, ref_logprobs)`` of KL(policy || reference), token by token."""
Correction = Callable[[Tensor, Tensor], Tensor]
"""``correction(old_logprobs, rollout_logprobs)`` returns the factor of each token's loss."""
Aggregation = Callable[[TrainBatch], tuple[Tensor, float]]
"""``aggregation(batch of an optimizer step) -> (weights, denominator)`` of ``sum(weight * loss) / denominator``."""

_LARGEST_LOG = 60.0
"""Largest log ratio that is passed to a correction, so that exp stays finite in fp32."""
_LARGEST_LOG_RATIO = 20.0
"""Largest log ratio of a surrogate, as in verl: a ratio of 5e8, whose square is finite in fp32. Beyond it a token has
no gradient. An infinite ratio would make NaN of every zero that it meets, in the loss or in a gradient."""


# -- surrogates


def ppo(
    logprobs: Tensor,
    old: Tensor,
    batch: TrainBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` (PPO, arXiv:1707.06347, equation 7).

    A ``clip_high`` above ``clip_low`` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). For instance, a token with
    the ratio 1.5 has the loss ``-min(1.5 * 2, 1.2 * 2) = -2.4`` where A = 2, and 3 where A = -2.

    Args:
        dual_clip: where A < 0, the loss is at most ``-dual_clip * A`` (arXiv:1912.09729); 0 turns this off.
    """
    ratio, advantages = compute_ratio(logprobs, old), batch.require_column("advantages")
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, ratio != clipped


def gspo(
    logprobs: Tensor, old: Tensor, batch: TrainBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Tensor, Tensor]:
    """Apply PPO's clip to the ratio of a whole sequence, ``exp(mean of log ratio)`` (GSPO, arXiv:2507.18071, eq. 5, 7).

    Use it with ``sequence_mean``. The mean is over the counting tokens of a sequence, whichever turns they belong to.
    Further sequences of the same episode, which other replicas may compute, have ratios of their own.
    """
    log_ratio = _average_sequences(logprobs - old, batch)
    ratio = batch.repeat_per_token(log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp())
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = batch.require_column("advantages")
    return -torch.minimum(ratio * advantages, clipped * advantages), ratio != clipped


def cispo(
    logprobs: Tensor, old: Tensor, batch: TrainBatch, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[Tensor, Tensor]:
    """Compute ``-constant(clip(ratio)) * A * logprob``: a clipped token keeps its gradient (CISPO, arXiv:2506.13585).

    A ``clip_low`` of 1 does not clip from below, as in that paper.
    """
    ratio = compute_ratio(logprobs, old).detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -clipped * batch.require_column("advantages") * logprobs, ratio != clipped


def gmpo(
    logprobs: Tensor, old: Tensor, batch: TrainBatch, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> tuple[Tensor, Tensor]:
    """Take the geometric mean of a sequence's ratios as its ratio (GMPO, arXiv:2507.20673).

    Each log ratio is first clipped to ``[-clip_low, clip_high]``, on the side that PPO clips. Use it with
    ``sequence_mean`` and one advantage per sequence.
    """
    log_ratio, advantages = logprobs - old, batch.require_column("advantages")
    clipped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    log_mean = _average_sequences(pessimistic, batch)
    ratio = batch.repeat_per_token(log_mean.clamp(max=_LARGEST_LOG_RATIO).exp())
    return -ratio * advantages, log_ratio != clipped


def sapo(
    logprobs: Tensor, old: Tensor, batch: TrainBatch, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[Tensor, Tensor]:
    """Compute ``-A * sigmoid(tau * (ratio - 1)) * 4 / tau``, a soft gate instead of a clip (SAPO, arXiv:2511.20347).

    tau is ``tau_positive`` where A > 0, else ``tau_negative``, which is larger, so that the gate is steeper.
    """
    ratio, advantages = compute_ratio(logprobs, old), batch.require_column("advantages")
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, torch.zeros_like(batch.mask)


# -- estimates of KL(policy || reference): Schulman, "Approximating KL Divergence" (2020)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL by k1, ``logprob - ref``: unbiased, of either sign. Use it in rewards; its gradient in a loss is
    0."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL by k2: ``(logprob - ref)^2 / 2``; its gradient in a loss is that of the KL divergence."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL by k3: ``exp(d) - 1 - d`` with ``d = ref - logprob``, never negative, as in GRPO (arXiv:2402.03300,
    equation 4).

    It is at most 10, and without a gradient beyond, as in verl: one token far from the reference would be infinite.
    """
    difference = (ref_logprobs - logprobs).clamp(-20, 20)  # exp stays finite
    return (difference.exp() - 1 - difference).clamp(max=10)


# -- corrections for a rollout that computes other logprobs than the trainer


def truncated_importance(old: Tensor, rollout: Tensor, *, max_ratio: float = 2.0) -> Tensor:
    """Compute ``min(exp(old - rollout), max_ratio)`` (truncated importance sampling, Ionides 2008).

    Between rollout and trainer: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    2025.
    """
    return (old - rollout).exp().clamp(max=max_ratio)


def masked_importance(old: Tensor, rollout: Tensor, *, min_ratio: float = 0.5, max_ratio: float = 5.0) -> Tensor:
    """Compute ``exp(old - rollout)`` where it lies in ``[min_ratio, max_ratio]``, else 0 (IcePop, arXiv:2510.18855)."""
    ratio = (old - rollout).exp()
    return torch.where(_is_within(ratio, min_ratio, max_ratio), ratio, 0.0)


def rejected_importance(old: Tensor, rollout: Tensor, *, min_ratio: float = 0.5, max_ratio: float = 2.0) -> Tensor:
    """Compute 1 where ``exp(old - rollout)`` lies in ``[min_ratio, max_ratio]``, else 0, so that other tokens do not
    count.

    Source: Liu et al., "When Speed Kills Stability", 2025.
    """
    return _is_within((old - rollout).exp(), min_ratio, max_ratio).to(old.dtype)


def pool_log_ratios(log_ratio: Tensor, batch: TrainBatch, level: Level) -> Tensor:
    """Replace each token's log ratio by that of its sequence, ``[N] -> [N]``.

    The log ratio of a sequence is the sum over its counting tokens (level ``sequence``), or their mean (``geometric``).
    For instance, ratios 2 and 1/8 become 1/4 and 1/4, or 1/2 and 1/2.
    """
    is_sum = level == "sequence"
    pooled = batch.sum_per_sequence(log_ratio * batch.mask) if is_sum else _average_sequences(log_ratio, batch)
    return batch.repeat_per_token(pooled.clamp(-_LARGEST_LOG, _LARGEST_LOG))


# -- score centering: an expectation that is known is taken out of the gradient


def center_scores(outputs: TokenOutputs, batch: TrainBatch, correction: Correction | None = None) -> Tensor:
    """Compute the term ``[N]`` that removes the mean gradient over the sampler's distribution from each token's
    surrogate times correction (score centering, arXiv:2609.20807).

    At one position let the sampler sample id v with probability q_v, and let the loss of v be
    ``-A f(old_v / q_v) p_v / old_v``. If all advantages A are equal there is nothing to learn. The mean gradient, the
    sum over v of ``-A q_v f(old_v / q_v) (p_v / old_v) d log p_v``, is still a drift unless ``f`` is the whole ratio.
    The term is this sum with the opposite sign: a cross-entropy with targets that have no gradient. Its classes are the
    sampler's k likeliest ids, and all other ids together. The published form, with ``rho = q(rest) / p(rest)``, has the
    same gradient; this form stays exact where p(rest) is close to 0.

    The clip of a surrogate is left out of the term. A clip also has a mean gradient, which does not come from the
    sampler: it holds back ids that have moved far. With this part removed the policy diverges.

    Raises:
        ValueError: the batch lacks a column, or the outputs the top logprobs.
    """
    if (top := outputs.top_logprobs) is None:
        raise ValueError(
            "center_scores: the outputs have no logprobs of the sampler's likeliest ids; set "
            "--algorithm.score-centering to the number of ids"
        )
    sampler = batch.require_column("rollout_top_logprobs").exp()
    q = torch.cat([sampler, (1 - sampler.sum(-1, keepdim=True)).clamp_min(0)], -1)  # [N, k + 1]
    old = top.detach() if batch.old_logprobs is None else batch.require_column("old_top_logprobs")
    # A class without mass counts for nothing, but must not be infinite.
    factors = correction(old, q.log().maximum(old - _LARGEST_LOG)) if correction else 1.0
    ratio = compute_ratio(top.detach(), old)
    return batch.require_column("advantages") * (q * factors * ratio * top).sum(-1)


def refuse_sequence_ratio(surrogate: Surrogate) -> None:
    """Raise ValueError for a surrogate that has one ratio for a whole sequence."""
    while isinstance(surrogate, partial):
        surrogate = surrogate.func
    if surrogate in (gspo, gmpo):
        raise ValueError(
            f"loss: {surrogate.__name__} has one ratio for a whole sequence, and score centering needs a ratio of each "
            "token; take ppo, cispo or sapo, or leave --algorithm.score-centering out"
        )


# -- aggregations


def token_mean(batch: TrainBatch) -> tuple[Tensor, float]:
    """Give every counting token the same weight (DAPO, arXiv:2503.14476, section 3.3)."""
    return batch.mask.float(), max(float(batch.mask.sum()), 1.0)


def sequence_mean(batch: TrainBatch) -> tuple[Tensor, float]:
    """Give every episode the same weight: its loss is the mean over the tokens of all its sequences.

    Where each episode is one sequence, this is GRPO's mean over sequences (arXiv:2402.03300, equation 3). An episode
    with several sequences, because its context was rewritten, has the same weight as other episodes.
    """
    lengths = batch.sum_per_episode(batch.sum_per_sequence(batch.mask.float()))
    per_sequence = lengths.clamp_min(1)[batch.number_episodes()]
    return batch.mask / batch.repeat_per_token(per_sequence), max(float((lengths > 0).sum()), 1.0)


def constant_length(batch: TrainBatch, *, tokens: int) -> tuple[Tensor, float]:
    """Return weights ``[N]`` of tokens, 1 where sampled, and their divisor: the number of episodes times ``tokens``.

    ``tokens`` is a constant for all episodes, such as the most tokens that a completion may have.

    Source: Dr. GRPO, arXiv:2503.20783.
    """
    return batch.mask.float(), float(batch.num_episodes * tokens)


# -- losses


def policy_loss(
    outputs: TokenOutputs,
    batch: TrainBatch,
    *,
    surrogate: Surrogate = ppo,
    kl_coef: float = 0.0,
    kl: KlEstimate = kl_k3,
    entropy_coef: float = 0.0,
    correction: Correction | None = None,
    importance_level: Level = "token",
    center: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum a surrogate's loss, plus ``kl_coef`` times the KL to a reference, less ``entropy_coef`` times the entropy.

    A batch without ``old_logprobs`` is the only optimizer step of its rollout; the current logprobs are then the old
    ones. The metric ``loss`` weighs every counting token equally, without ``batch.weights``.

    Args:
        correction: multiplies the loss of each token by a factor, at ``importance_level`` (``pool_log_ratios``).
        center: whether to add the term of ``center_scores``, which reads the sampler's likeliest ids.
    """
    mask = batch.mask
    old = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    loss, clipped = surrogate(outputs.logprobs, old, batch)
    ratio = compute_ratio(outputs.logprobs.detach(), old)
    metrics = {
        "entropy": (outputs.entropy * mask).sum().detach(),
        "clip_fraction": (clipped & mask).sum(),
        "ratio_max": torch.where(mask, ratio, 0).amax() if len(ratio) else torch.zeros(()),
    }
    if correction:
        rollout = batch.require_column("rollout_logprobs")
        if importance_level != "token":
            old, rollout = pool_log_ratios(old - rollout, batch, importance_level), torch.zeros_like(old)
        factors = correction(old, rollout)
        loss = loss * factors
        metrics |= {"correction": (factors * mask).sum(), "rejected": ((factors == 0) & mask).sum()}
    if center:
        refuse_sequence_ratio(surrogate)
        loss = loss + center_scores(outputs, batch, correction)
        metrics["top_mass"] = (batch.require_column("rollout_top_logprobs").exp().sum(-1) * mask).sum()
    if kl_coef:
        penalty = kl(outputs.logprobs, batch.require_column("ref_logprobs"))
        loss = loss + kl_coef * penalty
        metrics["kl"] = (penalty * mask).sum().detach()
    if entropy_coef:
        loss = loss - entropy_coef * outputs.entropy
    total = _sum_weighted(loss, batch)
    return total, metrics | {"loss": (loss * mask).sum().detach()}


def value_loss(outputs: ValueOutputs, batch: TrainBatch, *, clip: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum ``(value - return)^2 / 2`` over the counting tokens.

    With ``clip``, take the larger of this and the same with the value clipped to within ``clip`` of the value before
    the update (PPO's baselines; Engstrom et al., arXiv:2005.12729).
    """
    values, returns, mask = outputs.values, batch.require_column("returns"), batch.mask
    loss = (values - returns).square()
    metrics = {"value_loss": (loss * mask).sum().detach() / 2}
    if clip:
        before = batch.require_column("values")
        near = torch.clamp(values, before - clip, before + clip)
        metrics["value_clip_fraction"] = ((near != values) & mask).sum()
        loss = torch.maximum(loss, (near - returns).square())
    return _sum_weighted(loss / 2, batch), metrics


def sft_loss(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the cross-entropy of the counting targets."""
    total = -_sum_weighted(outputs.logprobs, batch)
    return total, {"loss": total.detach()}


# -- parts


def compute_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Compute ``exp(logprobs - old)``, at most ``exp(_LARGEST_LOG_RATIO)``."""
    return (logprobs - old).clamp(max=_LARGEST_LOG_RATIO).exp()


def _sum_weighted(loss: Tensor, batch: TrainBatch) -> Tensor:
    return (loss * (batch.mask if batch.weights is None else batch.weights)).sum()


def _is_within(ratio: Tensor, least: float, largest: float) -> Tensor:
    return (ratio >= least) & (ratio <= largest)


def _average_sequences(x: Tensor, batch: TrainBatch) -> Tensor:
    """Take the mean, ``[N] -> [B]``, over each sequence's counting tokens, zero where there are none."""
    return batch.sum_per_sequence(x * batch.mask) / batch.sum_per_sequence(batch.mask.float()).clamp_min(1)
