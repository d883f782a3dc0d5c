"""Vocabulary-parallel logprobs and entropy, and those of further ids, against log_softmax over the whole vocabulary."""

import itertools

import pytest
import torch
import torch.distributed as dist
from support.ranks.engines_cases import join_group, start_process
from support.ranks.pool import draw_address

from engines.megatron import logprobs
from rlworker.checks import huggingface

VOCAB, PADDED, TOKENS, HIDDEN = 11, 12, 13, 8
CASES = [(1.0, 0.0, (), 0), (0.7, 0.3, (), 0), (0.7, 0.3, (3, 8, 9), 0), (1.0, 0.0, (), 4), (0.7, 0.3, (3, 8, 9), 5)]
"""Temperature, weight of the entropy, banned ids and how many further ids are scored."""


def compare_cases(rank, world, address) -> dict[tuple, list[float]]:
    """Differences of every case: logits kept, made again, and of a frozen weight, so many in memory at a time."""
    start_process(rank)
    group, found = join_group(rank, world, address), {}
    for case, keep, at_once in itertools.product(CASES, (True, False, None), (2**25, 20)):
        found[*case, keep, at_once] = outputs_and_gradient(rank, world, group, *case, keep, at_once)
    return found


def outputs_and_gradient(rank, world, group, temperature, entropy_weight, banned, top, keep, at_once) -> list[float]:
    """Gradients are taken twice, as from a graph that is retained. ``keep`` None freezes the weight."""

    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(PADDED, HIDDEN, generator=generator)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weight = torch.randn(TOKENS, generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    mine = rows.chunk(world)[rank].clone().requires_grad_(keep is not None)
    inputs = [hidden, mine] if mine.requires_grad else [hidden]
    settings = {"temperature": temperature, "vocab": VOCAB, "keep_logits": keep, "group": group}
    settings |= {"banned": banned, "at_once": at_once}
    further, others_weight = draw_top_ids(top, banned, generator), torch.randn(TOKENS, top + 1, generator=generator)
    settings["top_ids"] = further
    out = logprobs.score_tokens(hidden, mine, target, **settings)
    loss = (out.logprobs * weight).sum()
    if entropy_weight:
        loss = loss + entropy_weight * (out.entropy * weight**2).sum()
    assert (out.top_logprobs is None) == (further is None)
    if top:
        loss = loss + (out.top_logprobs * others_weight).sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    d_hidden, *d_mine = torch.autograd.grad(loss, inputs)
    dist.all_reduce(d_hidden, group=group)

    whole, states = rows[:VOCAB].double().requires_grad_(), hidden.detach().double().requires_grad_()
    allowed = [token for token in range(VOCAB) if token not in banned]
    log_p = (states @ whole[allowed].T / temperature).log_softmax(-1)
    columns = [allowed.index(token) if token in allowed else None for token in target.tolist()]
    assert columns.count(None) == sum(target.tolist().count(token) for token in banned) >= len(banned)
    chosen = torch.stack([p.new_zeros(()) if column is None else p[column] for p, column in zip(log_p, columns)])
    entropy = -(log_p.exp() * log_p).sum(-1)
    pairs = [(out.logprobs, chosen), (out.entropy, entropy)]
    loss = (chosen * weight).sum() + entropy_weight * (entropy * weight**2).sum()
    if further is not None:
        wanted = sum_classes(log_p, [[allowed.index(token) for token in row if token >= 0] for row in further.tolist()])
        pairs.append((out.top_logprobs, wanted))
        loss = loss + (wanted * others_weight).sum()
    loss.backward()
    wanted = torch.nn.functional.pad(whole.grad, (0, 0, 0, PADDED - VOCAB)).chunk(world)[rank]
    pairs += [(d_hidden, states.grad), *((found, wanted) for found in (*d_mine, *first[1:]))]
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


def draw_top_ids(top: int, banned: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    """Different ids ``[TOKENS, top]`` of those that are not banned, fewer in some places and none in one."""
    if not top:
        return None
    allowed = torch.tensor([token for token in range(VOCAB) if token not in banned])
    order = torch.rand(TOKENS, len(allowed), generator=generator).argsort(-1)
    ids = torch.nn.functional.pad(allowed[order], (0, top), value=-1)[:, :top].int()
    ids[3, top // 2 :] = ids[5] = -1
    return ids


def sum_classes(log_p: torch.Tensor, columns: list[list[int]]) -> torch.Tensor:
    """Logprobs of some columns of each row, then 0 for those that are wanting, and of all other columns together."""
    rows, top = [], max(map(len, columns))
    for row, chosen in zip(log_p, columns, strict=True):
        others = [column for column in range(len(row)) if column not in chosen]
        rest = row[others].logsumexp(-1) if others else row.new_tensor(0.0)
        rows.append(torch.stack([*row[chosen], *row.new_zeros(top - len(chosen)), rest]))
    return torch.stack(rows)


@pytest.mark.parametrize("world", [1, 2])
def test_against_the_whole_vocabulary(four_ranks, world):
    """A banned token has no probability, and a target that is one has logprob 0 and no gradient."""
    for found in four_ranks.take_first(world).run(compare_cases, draw_address()):
        worst = max(found, key=lambda case: max(found[case]))
        assert len(found) == 30 and max(found[worst]) <= 1e-6, (worst, found[worst])


def score_support(rank, world, address, at_once, keep):
    """Largest differences of outputs and gradients of a random support, against all others masked in float64, each by
    the largest number of its kind if that is above 1."""
    start_process(rank)

    group = join_group(rank, world, address)
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(PADDED, HIDDEN, generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    support = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(TOKENS)])
    support[1, 1:], support[2], support[3, 2:] = -1, -1, -1  # one id, every id, two
    support[4], support[5] = torch.tensor([0, 1, 2, -1]), torch.tensor([7, 8, 9, 10])  # of one rank of two each
    target, weight = support[:, 0].clamp_min(0), torch.randn(2, TOKENS, generator=generator)
    mine = rows.chunk(world)[rank].clone().requires_grad_()
    settings = {"temperature": 0.7, "vocab": VOCAB, "keep_logits": keep, "group": group, "at_once": at_once}
    out = logprobs.score_tokens(hidden, mine, target, support=support, **settings)
    loss = (out.logprobs * weight[0] + out.entropy * weight[1]).sum()
    d_hidden, d_mine = torch.autograd.grad(loss, (hidden, mine))
    dist.all_reduce(d_hidden, group=group)

    whole, states = rows[:VOCAB].double().requires_grad_(), hidden.detach().double().requires_grad_()
    visible = (support[:, None, :] == torch.arange(VOCAB)[:, None]).any(-1) | (support < 0).all(-1, keepdim=True)
    log_p = (states @ whole.T / 0.7).masked_fill(~visible, -1e300).log_softmax(-1)
    chosen, entropy = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (chosen * weight[0] + entropy * weight[1]).sum().backward()
    d_rows = torch.cat([whole.grad, whole.grad.new_zeros(PADDED - VOCAB, HIDDEN)]).chunk(world)[rank]
    pairs = [(out.logprobs, chosen), (out.entropy, entropy), (d_hidden, states.grad), (d_mine, d_rows)]
    return [float((found.double() - want).abs().max() / want.abs().max().clamp_min(1)) for found, want in pairs]


@pytest.mark.parametrize("at_once", [2**25, 20], ids=["whole", "chunks"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize("world", [1, 2])
def test_ids_that_sampling_kept_against_the_masked_vocabulary(four_ranks, world, keep, at_once):
    for differences in four_ranks.take_first(world).run(score_support, draw_address(), at_once, keep):
        assert max(differences) <= 1e-6, differences


class OneRank:
    """A group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_a_vocabulary_of_a_real_model_is_summed_without_a_bias():
    """The engine's scores and those of HuggingFace's logits, against fp64. A naive sum in fp32 drifts by 1e-5."""
    generator = torch.Generator().manual_seed(0)
    logits, target = 3 * torch.randn(4, 262_144, generator=generator), torch.tensor([7, 131_071, 200_000, 262_143])
    exact = logits.double()
    log_p = exact - exact.logsumexp(-1, keepdim=True)
    chosen, entropy = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    settings = {"temperature": 1.0, "vocab": logits.shape[1], "group": OneRank()}
    for found in (
        logprobs.score_tokens(torch.eye(4), logits.T.contiguous(), target, **settings),
        huggingface.score_tokens(logits, target),
    ):
        apart = (found.logprobs.double() - chosen).abs()
        assert found.logprobs.dtype == torch.float32 and apart.mean() <= 1e-6 and apart.max() <= 4e-6, apart
        assert (found.entropy.double() - entropy).abs().max() <= 2e-5


def test_next_to_nothing_beyond_the_likeliest_is_exact_in_fp32():
    """The policy gives others 1e-7 and less, the sampler a tenth; and in the last row nothing is left to others."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.eye(TOKENS), torch.randn(VOCAB, TOKENS, generator=generator)
    weight[:4] += 20.0 + torch.arange(TOKENS)  # row 0 to 12: a tail of about e^-20 to e^-32
    weight[:, -1] = torch.tensor([0.0] * 4 + [-300.0] * (VOCAB - 4))
    top_ids, pull = torch.arange(4).expand(TOKENS, -1), torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1])
    x = weight.clone().requires_grad_()
    target = torch.zeros(TOKENS, dtype=torch.long)
    settings = {"temperature": 1.0, "vocab": VOCAB, "group": OneRank(), "top_ids": top_ids}
    out = logprobs.score_tokens(hidden.requires_grad_(), x, target, **settings)
    (out.top_logprobs * pull).sum().backward()
    whole = weight.double().requires_grad_()
    log_p = whole.T.log_softmax(-1)
    others = log_p[:, 4:].logsumexp(-1)
    (log_p[:, :4] @ pull[:4].double() + pull[4].double() * others).sum().backward()
    assert float(others.exp().max()) < 1e-7
    assert float((out.top_logprobs[:-1, -1] - others[:-1]).abs().max()) <= 1e-5
    assert out.top_logprobs.isfinite().all() and float((x.grad[:, :-1] - whole.grad[:, :-1]).abs().max()) <= 1e-6
    assert float((x.grad[:4, -1] - whole.grad[:4, -1]).abs().max()) <= 1e-6 and not x.grad[4:, -1].any()
