"""Losses of a router alone, which its weights hand on to the loss of the optimizer step."""

import torch
from torch import Tensor


def sum_balance_loss(scores: Tensor, counts: Tensor, chosen: int) -> Tensor:
    """Compute this rank's part of the auxiliary loss of a micro-batch, times the tokens of the micro-batch.

    The auxiliary loss is ``E * sum of f * P`` over the E experts, with f the share of tokens that choose an expert and
    P its mean score (Switch Transformer, arXiv:2101.03961, equations 4 to 6). It is k where all experts have equally
    many tokens, and 0 without a token.

    Args:
        scores: ``[n, E]`` float32, softmax over the experts, of this rank's tokens. counts: ``[E]`` long, tokens of the
            whole micro-batch that chose each expert. chosen: k, experts of each token.
    """
    tokens = counts.sum().clamp(min=1) / chosen
    return len(counts) * (counts * scores.sum(dim=0)).sum() / tokens


def sum_z_loss(logits: Tensor) -> Tensor:
    """Compute the sum over tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv:2202.08906, equation 5), of ``[n, E]``."""
    return logits.logsumexp(dim=-1).square().sum()


class AddedLoss(torch.autograd.Function):
    """Returns a tensor as it is; on the way back the loss gets a gradient of 1, whatever the tensor's own is."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones(())
