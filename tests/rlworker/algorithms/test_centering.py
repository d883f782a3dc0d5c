"""Score centering against sums over whole vocabularies and the published form."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from rlworker.algorithms import losses
from rlworker.algorithms.losses import center_scores, policy_loss
from rlworker.algorithms.objective import check_centering, configure_loss
from rlworker.config.algorithm import AlgorithmConfig

N, VOCAB = 6, 24
SURROGATES = {
    "ppo": losses.ppo,
    "dual clip": partial(losses.ppo, dual_clip=1.5),
    "cispo": partial(losses.cispo, clip_low=0.2, clip_high=0.2),
    "sapo": losses.sapo,
}
UNCLIPPED = partial(losses.ppo, clip_low=1.0, clip_high=1e9)
CORRECTIONS = {"none": None, "truncated": losses.truncated_importance, "masked": losses.masked_importance}


def draw(seed: int = 0, tokens: int = N, vocab: int = VOCAB, noise: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy, and log-probabilities of an old policy and of a sampler that are not quite the same:
    ``[tokens, vocab]`` each, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, *others = (torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) for _ in range(3))
    return 2 * logits, *((2 * logits + noise * other).log_softmax(-1) for other in others)


def classes(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities ``[N, k + 1]`` of some ids, 0 for -1, and of all others together."""
    used = ids >= 0
    columns = torch.where(used, ids, log_p.shape[-1]).long()
    is_other = torch.ones(len(log_p), log_p.shape[-1] + 1, dtype=torch.bool).scatter(-1, columns, False)[:, :-1]
    chosen = torch.where(used, log_p.gather(-1, ids.clamp_min(0).long()), 0.0)
    others = (log_p.exp() * is_other).sum(-1, keepdim=True).clamp_min(1e-30)  # as the head has it where there are none
    return torch.cat([chosen, others.log()], -1)


def make_batch(log_old: Tensor | None, log_q: Tensor, top: int, advantages: Tensor, targets: Tensor | None = None):
    """A batch of one sequence, all of whose targets were sampled, with the sampler's ``top`` likeliest ids."""
    tokens = len(log_q)
    targets = torch.zeros(tokens, dtype=torch.long) if targets is None else targets
    values, ids = log_q.topk(top, -1)
    columns = (
        {} if log_old is None else {"old_logprobs": pick(log_old, targets), "old_top_logprobs": classes(log_old, ids)}
    )
    return TrainBatch(
        (tokens,),
        targets,
        targets,
        targets,
        torch.ones(tokens, dtype=torch.bool),
        advantages=advantages,
        rollout_logprobs=pick(log_q, targets),
        rollout_top_ids=ids.int(),
        rollout_top_logprobs=values,
        **columns,
    )


def pick(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids[:, None])[:, 0]


def make_outputs(logits: Tensor, batch: TrainBatch) -> TokenOutputs:
    log_p = logits.log_softmax(-1)
    return TokenOutputs(pick(log_p, batch.targets), torch.zeros(len(logits)), classes(log_p, batch.rollout_top_ids))


def differ(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -0.5, 1.5, -2.0], dtype=torch.float64)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_term_is_the_mean_of_what_might_have_been_sampled(correction):
    """With every id among the likeliest its gradient is that of the loss of each id, one after another, times the
    sampler's probability of it, with the other sign; its value is that of the cross-entropy."""
    logits, log_old, log_q = draw()
    loss = partial(policy_loss, surrogate=UNCLIPPED, correction=CORRECTIONS[correction])
    want, value = torch.zeros_like(logits), 0.0
    for token in range(VOCAB):
        targets = torch.full((N,), token)
        batch = make_batch(log_old, log_q, 1, ADVANTAGES, targets)
        batch = replace(batch, weights=pick(log_q, targets).exp())
        x = logits.clone().requires_grad_()
        outputs = make_outputs(x, batch)
        (slope,) = torch.autograd.grad(loss(outputs, batch)[0], outputs.logprobs, retain_graph=True)
        value -= float((slope * outputs.logprobs).sum())
        want -= torch.autograd.grad((slope * outputs.logprobs).sum(), x)[0]
    x = logits.clone().requires_grad_()
    batch = make_batch(log_old, log_q, VOCAB, ADVANTAGES)
    term = center_scores(make_outputs(x, batch), batch, CORRECTIONS[correction]).sum()
    (got,) = torch.autograd.grad(term, x)
    assert differ(got, want) <= 1e-12 and float(term) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_published_form_has_the_same_gradient(correction):
    """``A * sum over the likeliest of (q f(p / q) - rho f(1 / rho) p) log p``, with rho the ratio of what they leave,
    at the first step on a rollout."""
    logits, _, log_q = draw(2)
    batch = make_batch(None, log_q, 5, ADVANTAGES)
    x = logits.clone().requires_grad_()
    outputs = make_outputs(x, batch)
    head, q = outputs.top_logprobs[:, :-1], batch.rollout_top_logprobs.exp()
    f = CORRECTIONS[correction] or (lambda old, rollout: torch.ones_like(old))
    rho = (1 - q.sum(-1)) / (1 - head.detach().exp().sum(-1))
    alpha = rho * f(-rho.log(), torch.zeros_like(rho))
    residual = q * f(head.detach(), q.log()) - alpha[:, None] * head.detach().exp()
    (want,) = torch.autograd.grad((ADVANTAGES * (residual * head).sum(-1)).sum(), x, retain_graph=True)
    term = center_scores(outputs, batch, CORRECTIONS[correction]).sum()
    assert differ(torch.autograd.grad(term, x)[0], want) <= 1e-12


def take_gradients(logits: Tensor, log_old: Tensor | None, log_q: Tensor, loss, top: int, advantage: float) -> Tensor:
    """Gradients ``[vocab, vocab]`` of the logits of one place, for each id that might be drawn there."""
    vocab = logits.shape[-1]
    wide = [x.expand(vocab, -1) if x is not None else None for x in (log_old, log_q)]
    batch = make_batch(*wide, top, torch.full((vocab,), advantage, dtype=torch.float64), torch.arange(vocab))
    x = logits.expand(vocab, -1).clone().requires_grad_()
    return torch.autograd.grad(loss(make_outputs(x, batch), batch)[0], x)[0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("surrogate", "first"), [*((name, True) for name in SURROGATES), ("unclipped", False)], ids=str
)
def test_equal_advantages_teach_nothing_in_the_mean(surrogate, first, advantage):
    """In the mean over the sampler's ids, in the first step on them or a later one; without the term they pull at the
    policy."""
    logits, log_old, log_q = draw(5, tokens=1, vocab=50)
    surrogates = SURROGATES | {"unclipped": UNCLIPPED}
    loss = partial(policy_loss, surrogate=surrogates[surrogate], correction=losses.truncated_importance)
    old, means = None if first else log_old, []
    for function in (loss, partial(loss, center=True)):
        gradients = take_gradients(logits, old, log_q, function, 50, advantage)
        means.append(float((log_q[0].exp()[:, None] * gradients).sum(0).norm()))
    assert means[0] > 5e-3 and means[1] <= 1e-7, means


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_pull_of_a_clip_stays(surrogate, advantage):
    """In a later step the mean gradient of equal advantages is that by which the clip changes the loss."""
    logits, log_old, log_q = draw(5, tokens=1, vocab=50)
    means = []
    for chosen, center in ((UNCLIPPED, False), (SURROGATES[surrogate], False), (SURROGATES[surrogate], True)):
        loss = partial(policy_loss, surrogate=chosen, correction=losses.truncated_importance, center=center)
        gradients = take_gradients(logits, log_old, log_q, loss, 50, advantage)
        means.append((log_q[0].exp()[:, None] * gradients).sum(0))
    plain, clipped, centered = means
    assert float((clipped - plain).norm()) > 1e-3
    assert float((centered - (clipped - plain)).norm()) <= 1e-7


def test_entries_that_are_not_used_count_for_nothing():
    """Banned ids fill up a row, and a target that was not sampled has none at all."""
    logits, log_old, log_q = draw(3)
    batch = make_batch(log_old, log_q, 4, ADVANTAGES)
    pad = torch.nn.functional.pad
    wide = replace(
        batch,
        rollout_top_ids=pad(batch.rollout_top_ids, (0, 2), value=-1),
        rollout_top_logprobs=pad(batch.rollout_top_logprobs, (0, 2), value=-torch.inf),
        old_top_logprobs=torch.cat([pad(batch.old_top_logprobs[:, :4], (0, 2)), batch.old_top_logprobs[:, 4:]], -1),
    )
    found = []
    for correction in CORRECTIONS.values():
        for one in (batch, wide):
            x = logits.clone().requires_grad_()
            term = center_scores(make_outputs(x, one), one, correction)
            found.append((term, torch.autograd.grad(term.sum(), x)[0]))
        (term, gradient), (wide_term, wide_gradient) = found[-2:]
        assert differ(wide_term, term) <= 1e-14 and differ(wide_gradient, gradient) <= 1e-14
    mask = torch.tensor([False] + [True] * (N - 1))
    nothing = replace(
        wide,
        mask=mask,
        rollout_top_ids=wide.rollout_top_ids.masked_fill(~mask[:, None], -1),
        rollout_top_logprobs=wide.rollout_top_logprobs.masked_fill(~mask[:, None], -torch.inf),
    )
    x = logits.clone().requires_grad_()
    loss, metrics = policy_loss(make_outputs(x, nothing), nothing, correction=losses.masked_importance, center=True)
    loss.backward()
    assert loss.isfinite() and not x.grad[0].any() and x.grad[1:].any(-1).all()
    assert metrics["top_mass"].item() == pytest.approx(float(log_q[1:].topk(4, -1)[0].exp().sum()))


@pytest.mark.parametrize("surrogate", [losses.gspo, partial(losses.gmpo, clip_low=0.1)])
def test_one_ratio_for_a_sequence_is_refused(surrogate):
    logits, log_old, log_q = draw()
    batch = make_batch(log_old, log_q, 4, ADVANTAGES)
    message = r"loss: g.po has one ratio for a whole sequence.*take ppo, cispo or sapo"
    with pytest.raises(ValueError, match=message):
        policy_loss(make_outputs(logits, batch), batch, surrogate=surrogate, center=True)
    with pytest.raises(ValueError, match=message):
        check_centering(partial(policy_loss, surrogate=surrogate, center=True), AlgorithmConfig(score_centering=8))


def test_what_is_missing_is_said():
    logits, log_old, log_q = draw()
    batch = make_batch(log_old, log_q, 4, ADVANTAGES)
    outputs = make_outputs(logits, batch)
    with pytest.raises(ValueError, match=r"no logprobs of the sampler's likeliest ids; set"):
        center_scores(replace(outputs, top_logprobs=None), batch)
    for name in ("rollout_top_logprobs", "old_top_logprobs"):
        with pytest.raises(ValueError, match=f"it has no column {name}, which is needed"):
            center_scores(outputs, replace(batch, **{name: None}))


def test_a_loss_and_the_settings_must_agree():
    centering = AlgorithmConfig(score_centering=8)
    with pytest.raises(ValueError, match=r"center=True, which needs a number .* algorithm.score_centering is 0"):
        check_centering(partial(partial(policy_loss, center=True), kl_coef=0.1), AlgorithmConfig())
    with pytest.raises(ValueError, match=r"center=False, which needs 0 .* algorithm.score_centering is 8"):
        check_centering(partial(policy_loss, kl_coef=0.1), centering)
    for loss, algorithm in ((policy_loss, AlgorithmConfig()), (losses.sft_loss, centering)):
        check_centering(loss, algorithm)
    for algorithm in (AlgorithmConfig(), centering):
        check_centering(configure_loss(algorithm), algorithm)


def test_the_settings_become_a_centered_and_corrected_loss():
    logits, _, log_q = draw(4)
    batch = make_batch(None, log_q, 4, ADVANTAGES)
    outputs = make_outputs(logits, batch)
    plain = configure_loss(AlgorithmConfig())(outputs, batch)
    assert "correction" not in plain[1] and "top_mass" not in plain[1]
    loss, metrics = configure_loss(AlgorithmConfig(score_centering=4), "truncated")(outputs, batch)
    want, _ = policy_loss(outputs, batch, correction=losses.truncated_importance)
    want = want + center_scores(outputs, batch, losses.truncated_importance).sum()
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    assert metrics["correction"] > 0 and metrics["top_mass"] > 0
