"""Vocabulary-parallel logprobs and entropy, and those of further ids, against log_softmax over the whole vocabulary."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.ranks.engines_cases import join_group, start_process
from support.ranks.pool import draw_address
from support.rounding import Draw, Rounding, check_distances, measure_rounding

from engines.megatron import logprobs
from rlworker.checks.reference import huggingface

VOCAB, PADDED, TOKENS, HIDDEN = 11, 12, 13, 8
CASES = [(1.0, 0.0, (), 0), (0.7, 0.3, (), 0), (0.7, 0.3, (3, 8, 9), 0), (1.0, 0.0, (), 4), (0.7, 0.3, (3, 8, 9), 5)]
"""Temperature, weight of the entropy, banned ids and how many further ids are scored."""


def score_cases(rank, world, address) -> dict[tuple, dict]:
    """Numbers of every case: logits kept, made again, and of a frozen weight, so many in memory at a time."""
    start_process(rank)
    group, found = join_group(rank, world, address), {}
    for case, keep, at_once in itertools.product(CASES, (True, False, None), (2**25, 20)):
        found[case, keep, at_once] = score_case(rank, world, group, case, keep, at_once)
    return found


@dataclass(frozen=True)
class Drawn:
    """Random numbers of a case: ``rows`` of the output layer, and ``hidden`` states of tokens.

    Attributes:
        weight, others_weight: the loss has logprobs times the one, and those of further ids times the other.
    """

    rows: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    hidden: torch.Tensor
    further: torch.Tensor | None
    others_weight: torch.Tensor


def draw_case(banned: tuple[int, ...], top: int) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    return Drawn(
        rows=3 * torch.randn(PADDED, HIDDEN, generator=generator),
        target=torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        weight=torch.randn(TOKENS, generator=generator),
        hidden=torch.randn(TOKENS, HIDDEN, generator=generator),
        further=draw_top_ids(top, banned, generator),
        others_weight=torch.randn(TOKENS, top + 1, generator=generator),
    )


def score_case(rank, world, group, case, keep, at_once) -> dict[str, torch.Tensor]:
    """Gradients are taken twice, as from a graph that is retained. ``keep`` None freezes the weight."""
    temperature, entropy_weight, banned, top = case
    drawn = draw_case(banned, top)
    hidden = drawn.hidden.requires_grad_()
    mine = drawn.rows.chunk(world)[rank].clone().requires_grad_(keep is not None)
    inputs = [hidden, mine] if mine.requires_grad else [hidden]
    settings = {"temperature": temperature, "vocab": VOCAB, "keep_logits": keep, "group": group}
    settings |= {"banned": banned, "at_once": at_once, "top_ids": drawn.further}
    out = logprobs.score_tokens(hidden, mine, drawn.target, **settings)
    loss = (out.logprobs * drawn.weight).sum()
    if entropy_weight:
        loss = loss + entropy_weight * (out.entropy * drawn.weight**2).sum()
    assert (out.top_logprobs is None) == (drawn.further is None)
    found = {"logprobs": out.logprobs.detach(), "entropy": out.entropy.detach()}
    if top:
        loss = loss + (out.top_logprobs * drawn.others_weight).sum()
        found["top logprobs"] = out.top_logprobs.detach()
    _, *first = torch.autograd.grad(loss, inputs, retain_graph=True)
    d_hidden, *second = torch.autograd.grad(loss, inputs)
    dist.all_reduce(d_hidden, group=group)
    return found | {"hidden": d_hidden, "rows": [*first, *second]}


def score_whole_vocabulary(draw: Draw, temperature, entropy_weight, banned, top) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a case by log_softmax over the tokens that are not banned."""
    drawn = draw_case(banned, top)
    with draw.computing():
        inputs = draw.move({"rows": drawn.rows, "hidden": drawn.hidden})
        allowed = [token for token in range(VOCAB) if token not in banned]
        log_p = (inputs["hidden"] @ inputs["rows"][allowed].T / temperature).log_softmax(-1)
        columns = [allowed.index(token) if token in allowed else None for token in drawn.target.tolist()]
        assert columns.count(None) == sum(drawn.target.tolist().count(token) for token in banned) >= len(banned)
        chosen = torch.stack([p.new_zeros(()) if column is None else p[column] for p, column in zip(log_p, columns)])
        entropy = -(log_p.exp() * log_p).sum(-1)
        found = {"logprobs": chosen, "entropy": entropy}
        loss = (chosen * drawn.weight).sum() + entropy_weight * (entropy * drawn.weight**2).sum()
        if drawn.further is not None:
            further = [[allowed.index(token) for token in row if token >= 0] for row in drawn.further.tolist()]
            found["top logprobs"] = sum_classes(log_p, further)
            loss = loss + (found["top logprobs"] * drawn.others_weight).sum()
        loss.backward()
        return found | {"hidden": inputs["hidden"].grad, "rows": inputs["rows"].grad}


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
def test_against_the_whole_vocabulary(four_ranks, measured, world):
    """A banned token has no probability, and a target that is one has logprob 0 and no gradient."""
    ranks = four_ranks.take_first(world).run(score_cases, draw_address())
    wants = {case: measure_rounding(score_whole_vocabulary, *case, folder=None) for case in CASES}
    assert len(ranks[0]) == 30
    for key in ranks[0]:
        compare_ranks([rank[key] for rank in ranks], wants[key[0]], measured, str(key))


def compare_ranks(ranks: list[dict], want: Rounding, measured, label: str) -> None:
    """Compare what ranks found, each with the gradients of its rows of the output layer."""
    rows = [torch.cat(parts) for parts in zip(*(rank["rows"] for rank in ranks), strict=True)]
    for rank in ranks:
        found = {kind: numbers for kind, numbers in rank.items() if kind != "rows"}
        distances = {kind: want.compare(kind, numbers) for kind, numbers in found.items()}
        distances |= {f"rows, {time}": want.compare("rows", tensor) for time, tensor in enumerate(rows)}
        check_distances(distances, measured, label)


@dataclass(frozen=True)
class Sampled:
    """Random numbers of ids that sampling kept: ``support [TOKENS, 4]``, of which the first is the target."""

    rows: torch.Tensor
    hidden: torch.Tensor
    support: torch.Tensor
    weight: torch.Tensor

    @property
    def target(self) -> torch.Tensor:
        return self.support[:, 0].clamp_min(0)


def draw_support() -> Sampled:
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(PADDED, HIDDEN, generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    support = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(TOKENS)])
    support[1, 1:], support[2], support[3, 2:] = -1, -1, -1  # one id, every id, two
    support[4], support[5] = torch.tensor([0, 1, 2, -1]), torch.tensor([7, 8, 9, 10])  # of one rank of two each
    return Sampled(rows, hidden, support, torch.randn(2, TOKENS, generator=generator))


def score_support(rank, world, address, at_once, keep) -> dict:
    """Outputs and gradients of a random support, on a rank."""
    start_process(rank)
    group, drawn = join_group(rank, world, address), draw_support()
    hidden, mine = drawn.hidden.requires_grad_(), drawn.rows.chunk(world)[rank].clone().requires_grad_()
    settings = {"temperature": 0.7, "vocab": VOCAB, "keep_logits": keep, "group": group, "at_once": at_once}
    out = logprobs.score_tokens(hidden, mine, drawn.target, support=drawn.support, **settings)
    loss = (out.logprobs * drawn.weight[0] + out.entropy * drawn.weight[1]).sum()
    d_hidden, d_mine = torch.autograd.grad(loss, (hidden, mine))
    dist.all_reduce(d_hidden, group=group)
    outputs = {"logprobs": out.logprobs.detach(), "entropy": out.entropy.detach()}
    return outputs | {"hidden": d_hidden, "rows": [d_mine]}


def score_masked_vocabulary(draw: Draw) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a random support with all other ids masked."""
    drawn = draw_support()
    with draw.computing():
        inputs = draw.move({"rows": drawn.rows, "hidden": drawn.hidden})
        visible = (drawn.support[:, None, :] == torch.arange(VOCAB)[:, None]).any(-1)
        visible = visible | (drawn.support < 0).all(-1, keepdim=True)
        log_p = (inputs["hidden"] @ inputs["rows"][:VOCAB].T / 0.7).masked_fill(~visible, -1e30).log_softmax(-1)
        chosen, entropy = log_p.gather(-1, drawn.target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        (chosen * drawn.weight[0] + entropy * drawn.weight[1]).sum().backward()
        outputs = {"logprobs": chosen, "entropy": entropy}
        return outputs | {"hidden": inputs["hidden"].grad, "rows": inputs["rows"].grad}


@pytest.mark.parametrize("at_once", [2**25, 20], ids=["whole", "chunks"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize("world", [1, 2])
def test_ids_that_sampling_kept_against_the_masked_vocabulary(four_ranks, measured, world, keep, at_once):
    ranks = four_ranks.take_first(world).run(score_support, draw_address(), at_once, keep)
    compare_ranks(ranks, measure_rounding(score_masked_vocabulary, folder=None), measured, f"{world} {keep} {at_once}")


class OneRank:
    """A group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_a_vocabulary_of_a_real_model_is_summed_without_a_bias():
    """The engine's scores and those of HuggingFace's logits, against fp64.

    Logprobs are about -17, whose last digit is 2e-6. Rounding leaves a quarter of it on average. A naive sum in fp32
    drifts by five of them and more.
    """
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
        digit = 2.0**-19
        assert found.logprobs.dtype == torch.float32 and 16 < -chosen.mean() < 32
        assert apart.mean() <= digit and apart.max() <= 4 * digit, apart
        assert (found.entropy.double() - entropy).abs().max() <= 10 * digit


LIKELY, PULL = 4, torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1])
"""The likeliest ids are the first; the sampler's probabilities of each, and of all others together."""


def draw_likely() -> torch.Tensor:
    weight = torch.randn(VOCAB, TOKENS, generator=torch.Generator().manual_seed(0))
    weight[:LIKELY] += 20.0 + torch.arange(TOKENS)  # row 0 to 12: a tail of about e^-20 to e^-32
    weight[:, -1] = torch.tensor([0.0] * LIKELY + [-300.0] * (VOCAB - LIKELY))
    return weight


def pull_to_sampler(draw: Draw) -> dict[str, torch.Tensor]:
    """Logprob of all others of each row, and the gradient of the logits."""
    drawn = draw_likely()
    with draw.computing():
        weight = draw.move({"weight": drawn})["weight"]
        log_p = weight.T.log_softmax(-1)
        others = log_p[:, LIKELY:].logsumexp(-1)
        (log_p[:, :LIKELY] @ PULL[:LIKELY].to(log_p.dtype) + PULL[LIKELY].to(log_p.dtype) * others).sum().backward()
        gradient = {"likely": weight.grad[:LIKELY], "others": weight.grad[LIKELY:, :-1]}
        return {"others": others[:-1], "gradient": gradient}


def test_next_to_nothing_beyond_the_likeliest_is_exact_in_fp32(measured):
    """The policy gives others 1e-7 and less, the sampler a tenth; and in the last row nothing is left to others."""
    x, target = draw_likely().requires_grad_(), torch.zeros(TOKENS, dtype=torch.long)
    settings = {"temperature": 1.0, "vocab": VOCAB, "group": OneRank(), "top_ids": torch.arange(4).expand(TOKENS, -1)}
    out = logprobs.score_tokens(torch.eye(TOKENS).requires_grad_(), x, target, **settings)
    (out.top_logprobs * PULL).sum().backward()
    want = measure_rounding(pull_to_sampler, folder=None)
    assert float(want.truth["others"][""].exp().max()) < 1e-7
    gradient = {"likely": x.grad[:LIKELY], "others": x.grad[LIKELY:, :-1]}
    distances = {
        "others": want.compare("others", out.top_logprobs[:-1, -1].detach()),
        "gradient": want.compare("gradient", gradient),
    }
    check_distances(distances, measured, "next to nothing")
    assert out.top_logprobs.isfinite().all() and not x.grad[LIKELY:, -1].any()
