"""Vocabulary-parallel logprobs and entropy against log_softmax over the whole vocabulary."""

from unittest.mock import patch

import pytest
import torch
from support.ranks.engines_cases import join_group, start_process
from support.ranks.pool import draw_address

VOCAB, PADDED, TOKENS, HIDDEN = 11, 12, 13, 8


def in_chunks(rank, world, address, at_once, *case):
    """``outputs_and_gradient`` with so many logits in memory at a time."""
    start_process(rank)
    from engines.megatron import logprobs

    with patch.object(logprobs, "_LOGITS_AT_ONCE", at_once):
        return outputs_and_gradient(rank, world, address, *case)


def outputs_and_gradient(rank, world, address, temperature, entropy_weight, banned, keep):
    """Largest differences of outputs and gradients; gradients are taken twice, as from a graph that is retained."""
    import torch.distributed as dist

    from engines.megatron import logprobs

    group = join_group(rank, world, address)
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(PADDED, HIDDEN, generator=generator)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weight = torch.randn(TOKENS, generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    mine = rows.chunk(world)[rank].clone().requires_grad_()
    settings = {"temperature": temperature, "vocab": VOCAB, "keep_logits": keep, "group": group}
    settings["banned"] = banned
    out = logprobs.score_tokens(hidden, mine, target, **settings)
    loss = (out.logprobs * weight).sum() + entropy_weight * (out.entropy * weight**2).sum()
    first = torch.autograd.grad(loss, (hidden, mine), retain_graph=True)
    d_hidden, d_mine = torch.autograd.grad(loss, (hidden, mine))
    dist.all_reduce(d_hidden, group=group)

    whole, states = rows[:VOCAB].double().requires_grad_(), hidden.detach().double().requires_grad_()
    allowed = [token for token in range(VOCAB) if token not in banned]
    log_p = (states @ whole[allowed].T / temperature).log_softmax(-1)
    columns = [allowed.index(token) if token in allowed else None for token in target.tolist()]
    assert columns.count(None) == sum(target.tolist().count(token) for token in banned) >= len(banned)
    chosen = torch.stack([p.new_zeros(()) if column is None else p[column] for p, column in zip(log_p, columns)])
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((chosen * weight).sum() + entropy_weight * (entropy * weight**2).sum()).backward()
    wanted = torch.nn.functional.pad(whole.grad, (0, 0, 0, PADDED - VOCAB)).chunk(world)[rank]
    pairs = (
        (out.logprobs, chosen),
        (out.entropy, entropy),
        (d_hidden, states.grad),
        (d_mine, wanted),
        (first[1], wanted),
    )
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize("at_once", [2**25, 20], ids=["whole", "chunks"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize(
    ("temperature", "entropy_weight", "banned"), [(1.0, 0.0, ()), (0.7, 0.3, ()), (0.7, 0.3, (3, 8, 9))]
)
@pytest.mark.parametrize("world", [1, 2])
def test_against_the_whole_vocabulary(four_ranks, world, temperature, entropy_weight, banned, keep, at_once):
    """A banned token has no probability, and a target that is one has logprob 0 and no gradient."""
    ranks = four_ranks.take_first(world)
    for differences in ranks.run(in_chunks, draw_address(), at_once, temperature, entropy_weight, banned, keep):
        assert max(differences) <= 1e-6, differences
