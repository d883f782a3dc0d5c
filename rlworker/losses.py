"""Losses: plain functions ``loss(outputs, batch) -> (sum over tokens, metric sums)``. Shapes are all ``[N]``."""

import torch
from torch import Tensor

from engines.batch import TrainBatch
from engines.interfaces import TokenOutputs


def policy_loss(
    outputs: TokenOutputs, batch: TrainBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (PPO, arXiv:1707.06347, equation 7) with a KL penalty to a reference where ``kl_coef > 0``.

    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` with ``ratio = exp(logprob - old_logprob)``. Where
    the batch has no ``old_logprobs`` this is the only step on its rollout, and they are these very logprobs.
    """
    mask = batch.mask
    old = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = (outputs.logprobs - old).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    metrics = {
        "entropy": (outputs.entropy * mask).sum().detach(),
        "clip_fraction": ((ratio != clipped) & mask).sum(),
        "ratio_max": torch.where(mask, ratio, 0).amax().detach() if len(ratio) else torch.zeros(()),
    }
    loss = -gain
    if kl_coef:
        kl = kl_low_variance(outputs.logprobs, batch.ref_logprobs)
        loss = loss + kl_coef * kl
        metrics["kl"] = (kl * mask).sum().detach()
    total = (loss * mask).sum()
    return total, metrics | {"loss": total.detach()}


def kl_low_variance(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) that is never negative: ``exp(d) - 1 - d``, ``d = ref - policy``.

    The estimator k3 of Schulman's "Approximating KL Divergence" (2020), as GRPO uses it (arXiv:2402.03300, equation 4).
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference


def sft_loss(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the targets that count."""
    total = -(outputs.logprobs * batch.mask).sum()
    return total, {"loss": total.detach()}
