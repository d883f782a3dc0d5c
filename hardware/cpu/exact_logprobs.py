"""vLLM's sampler with logprobs that keep the small terms of a large vocabulary.

torch's ``log_softmax`` adds up a row's exponentials in one fp32 accumulator for each vector lane on a CPU. Terms far
below the sum so far are lost, and every logprob comes out too large: by 1.4e-5 with 49,152 tokens and 7.1e-5 with
262,144 on average. ``Tensor.sum`` adds them up in blocks of blocks and stays within 1e-6.
"""

from typing import cast

import torch
from torch import Tensor
from vllm.config.model import LogprobsMode
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler


def compute_logprobs(logits: Tensor) -> Tensor:
    """Compute ``log softmax(logits)`` over the last dimension, in float32."""
    # Shifted by the largest first: the logarithm of the sum is then small for logits of any size, and rounds
    # by as little.
    shifted = logits.float() - logits.float().amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


class ExactSampler(Sampler):
    """Samples the same tokens as vLLM's sampler, and computes their logprobs by ``compute_logprobs``.

    Args:
        replaced: vLLM's sampler, whose settings are taken over.
    """

    def __init__(self, replaced: Sampler):
        mode = cast(LogprobsMode, replaced.logprobs_mode)
        super().__init__(mode, replaced.use_fp64_gumbel)
        if self.logprobs_mode == "processed_logprobs":
            self.topk_topp_sampler = _Draw("processed_logits", self.use_fp64_gumbel)

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        return compute_logprobs(logits)


class _Draw(TopKTopPSampler):
    """Returns logprobs where vLLM's returns the logits that they are computed from."""

    def forward_cpu(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        sampled, kept = super().forward_cpu(logits, generators, k, p)
        return sampled, None if kept is None else compute_logprobs(kept)
