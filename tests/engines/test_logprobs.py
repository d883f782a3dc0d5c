"""Vocabulary-parallel logprobs and entropy against log_softmax over the whole vocabulary."""

import pytest
import torch
from engines_cases import join_group, start_process
from ranks import free_address

VOCAB, PADDED = 11, 12


def outputs_and_gradient(rank, world, address, temperature, entropy_weight):
    start_process(rank)
    from engines.megatron.logprobs import token_outputs

    group = join_group(rank, world, address)
    generator = torch.Generator().manual_seed(0)
    whole = 5 * torch.randn(3, 4, PADDED, generator=generator)
    target = torch.randint(0, VOCAB, (3, 4), generator=generator)
    weight = torch.randn(3, 4, generator=generator)
    mine = whole.chunk(world, dim=-1)[rank].clone().requires_grad_()
    out = token_outputs(mine, target, temperature=temperature, vocab=VOCAB, group=group)
    ((out.logprobs * weight).sum() + entropy_weight * (out.entropy * weight**2).sum()).backward()

    full = whole[..., :VOCAB].double().requires_grad_()
    log_p = (full / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, target[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((logprobs * weight).sum() + entropy_weight * (entropy * weight**2).sum()).backward()
    wanted = torch.nn.functional.pad(full.grad, (0, PADDED - VOCAB)).chunk(world, dim=-1)[rank]
    pairs = (out.logprobs, logprobs), (out.entropy, entropy), (mine.grad, wanted)
    return [float((a.double() - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("pool", ["one_rank", "two_ranks"])
def test_against_the_whole_vocabulary(request, pool, temperature, entropy_weight):
    ranks = request.getfixturevalue(pool)
    for differences in ranks.run(outputs_and_gradient, free_address(), temperature, entropy_weight):
        assert max(differences) <= 3e-6, differences
