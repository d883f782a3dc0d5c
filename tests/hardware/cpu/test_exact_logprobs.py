"""Logprobs of vLLM's sampler on a CPU, over a real model's vocabulary, against fp64."""

from types import SimpleNamespace

import pytest
import torch

VOCABULARY = 262_144  # Gemma 3's
DIGIT = 2.0**-19
"""A last digit of most logprobs, which are from -16 to -32: rounding leaves a quarter of it on average."""


@pytest.mark.large  # it imports vLLM
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_logprobs_keep_the_small_terms_of_a_large_vocabulary(measured, mode):
    """Tokens are those that vLLM's own sampler draws; its logprobs are compared too, so that a mend upstream shows."""
    from vllm.v1.sample.sampler import Sampler

    from hardware.cpu.exact_logprobs import ExactSampler

    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    truth = logits.double().log_softmax(-1)
    drawn, differences = [], []
    for sampler in (Sampler(mode), ExactSampler(Sampler(mode))):
        torch.manual_seed(0)
        tokens, logprobs = sampler.topk_topp_sampler(logits.clone(), {}, None, None)
        if logprobs is None:
            logprobs = sampler.compute_logprobs(logits)
        drawn.append(tokens)
        differences.append((logprobs - truth).abs())
    assert torch.equal(*drawn)
    assert differences[0].mean() > 1e-5, "log_softmax is exact: ExactSampler is not needed"
    measured({"mean": float(differences[1].mean()), "largest": float(differences[1].max())})
    assert differences[1].mean() <= DIGIT and differences[1].max() <= 4 * DIGIT


@pytest.mark.large
def test_greedy_and_prompt_logprobs_are_exact():
    """Greedy tokens and prompts take ``compute_logprobs``, without a draw; large logits are rounded no further."""
    from vllm.v1.sample.sampler import Sampler

    from hardware.cpu.exact_logprobs import ExactSampler

    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3 + 1000
    sampler = ExactSampler(Sampler("processed_logprobs"))
    metadata = SimpleNamespace(all_greedy=True, all_random=False, max_num_logprobs=0, logprob_token_ids=None)
    tokens, logprobs = sampler.sample(logits.clone(), metadata)
    assert torch.equal(tokens.long(), logits.argmax(-1))
    assert (logprobs - logits.double().log_softmax(-1)).abs().max() <= 4 * DIGIT
