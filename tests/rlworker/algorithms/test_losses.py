"""Losses and gradients against numbers worked by hand; every one is a sum that no cut changes."""

import math
from functools import partial

import pytest
import torch

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, ValueOutputs
from rlworker.algorithms import losses
from rlworker.algorithms.losses import kl_k3, policy_loss, ppo, sft_loss, value_loss
from rlworker.algorithms.objective import configure_loss
from rlworker.config.algorithm import AlgorithmConfig


def make_batch(mask, **columns) -> TrainBatch:
    n = len(mask)
    zeros = torch.zeros(n, dtype=torch.long)
    tensors = {name: torch.tensor(value) for name, value in columns.items()}
    return TrainBatch((n,), zeros, zeros, zeros, torch.tensor(mask), **tensors)


def make_outputs(logprobs) -> TokenOutputs:
    return TokenOutputs(torch.tensor(logprobs, requires_grad=True), torch.full((len(logprobs),), 0.5))


def test_clipped_surrogate_by_hand():
    """Ratios 1.5, 0.5, 1.5, 0.5 against a clip of 0.2: the gain is the smaller of clipped and not."""
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 9.0], [1.0, 1.0, -1.0, -1.0, 5.0]
    batch = make_batch([True] * 4 + [False], old_logprobs=[-1.0] * 5, advantages=advantages)
    outputs = make_outputs([-1.0 + math.log(r) for r in ratios])
    loss, metrics = policy_loss(outputs, batch)
    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8))
    assert metrics["clip_fraction"] == 4 and metrics["ratio_max"].item() == pytest.approx(1.5)
    assert metrics["entropy"].item() == pytest.approx(2.0)
    loss.backward()
    # Gradient of -ratio * A is -ratio * A where the unclipped side is taken, zero where the clip holds.
    assert outputs.logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, 0.0])


def test_without_old_logprobs_the_gradient_is_reinforce():
    batch = make_batch([True, True, False], advantages=[2.0, -3.0, 7.0])
    outputs = make_outputs([-1.0, -2.0, -3.0])
    loss, metrics = policy_loss(outputs, batch)
    loss.backward()
    assert outputs.logprobs.grad.tolist() == [-2.0, 3.0, 0.0]
    assert metrics["clip_fraction"] == 0


def test_kl_by_hand():
    d, logprobs, ref = math.log(2.0), torch.tensor([-1.0]), torch.tensor([-1.5])
    assert losses.kl_k1(logprobs, ref).item() == 0.5 and losses.kl_k2(logprobs, ref).item() == 0.125
    assert kl_k3(logprobs, ref).item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    batch = make_batch([True, False], advantages=[0.0, 0.0], ref_logprobs=[-1.0 + d, 0.0])
    loss, metrics = policy_loss(make_outputs([-1.0, -1.0]), batch, kl_coef=0.3)
    assert loss.item() == pytest.approx(0.3 * (1 - d)) and metrics["kl"].item() == pytest.approx(1 - d)


def test_sft_counts_the_mask_only():
    loss, metrics = sft_loss(make_outputs([-1.0, -2.0, -4.0]), make_batch([True, False, True]))
    assert loss.item() == 5.0 and metrics["loss"].item() == 5.0


def test_dual_clip_by_hand():
    """A ratio of 9 at A = -1 costs 9; held to 3 times the advantage, 3 and no gradient. A > 0 is as ever."""
    batch = make_batch([True] * 3, old_logprobs=[0.0] * 3, advantages=[-1.0, -1.0, 1.0])
    outputs = make_outputs([math.log(9.0), math.log(2.0), math.log(9.0)])
    loss, _ = policy_loss(outputs, batch, surrogate=partial(ppo, dual_clip=3.0))
    assert loss.item() == pytest.approx(3.0 + 2.0 - 1.2)
    loss.backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])


def two_sequences(**columns) -> TrainBatch:
    zeros = torch.zeros(4, dtype=torch.long)
    tensors = {name: torch.tensor(value) for name, value in columns.items()}
    return TrainBatch((2, 2), zeros, zeros, zeros, torch.tensor([True, True, False, True]), **tensors)


def test_gspo_by_hand():
    """Log ratios 0.2 and 0.4 have mean 0.3: the sequence's ratio, clipped at 1.1. The second's is exp(-0.5)."""
    batch = two_sequences(old_logprobs=[0.0] * 4, advantages=[1.0, 1.0, 2.0, 2.0])
    outputs = make_outputs([0.2, 0.4, 7.0, -0.5])
    loss, metrics = policy_loss(outputs, batch, surrogate=partial(losses.gspo, clip_low=0.1, clip_high=0.1))
    assert loss.item() == pytest.approx(-(2 * 1.1 + 2 * math.exp(-0.5)))
    assert metrics["clip_fraction"] == 3
    loss.backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -2 * math.exp(-0.5)])
    outputs = make_outputs([0.02, 0.04, 0.0, 0.0])  # within the clip each token has half of both tokens' gradient
    policy_loss(outputs, batch, surrogate=partial(losses.gspo, clip_low=0.1, clip_high=0.1))[0].backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([-math.exp(0.03)] * 2 + [0.0, -2.0])


def test_cispo_by_hand():
    """A ratio of 9 is clipped to 5 and keeps its gradient, 5 * A; one of 1/4 is not clipped from below."""
    batch = make_batch([True, True, False], old_logprobs=[-3.0] * 3, advantages=[2.0, -1.0, 4.0])
    outputs = make_outputs([-3.0 + math.log(9.0), -3.0 - math.log(4.0), -1.0])
    loss, metrics = policy_loss(outputs, batch, surrogate=losses.cispo)
    want = -5 * 2 * (-3 + math.log(9)) + 0.25 * (-3 - math.log(4))
    assert loss.item() == pytest.approx(want) and metrics["clip_fraction"] == 1
    loss.backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([-10.0, 0.25, 0.0])


def test_gmpo_by_hand():
    """Log ratios 0.6 (held to 0.4, as A > 0) and -0.6 (not held, as A > 0): their mean is -0.1."""
    batch = two_sequences(old_logprobs=[0.0] * 4, advantages=[1.0, 1.0, -1.0, -1.0])
    outputs = make_outputs([0.6, -0.6, 0.0, -0.6])
    loss, _ = policy_loss(outputs, batch, surrogate=losses.gmpo)
    # In the second A < 0, so that -0.6 is held to -0.4.
    assert loss.item() == pytest.approx(-2 * math.exp(-0.1) + math.exp(-0.4))
    loss.backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([0.0, -math.exp(-0.1), 0.0, 0.0])


def test_sapo_by_hand():
    """At a ratio of 1 the gate is 2 / tau and its slope 1: the gradient is REINFORCE's. At 3 it has closed some way."""
    batch = make_batch([True, True], old_logprobs=[0.0, 0.0], advantages=[1.0, -1.0])
    outputs = make_outputs([0.0, 0.0])
    loss, _ = policy_loss(outputs, batch, surrogate=losses.sapo)
    assert loss.item() == pytest.approx(-2.0 + 2 / 1.05, rel=1e-5)
    loss.backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([-1.0, 1.0])
    outputs = make_outputs([math.log(3.0), math.log(3.0)])
    policy_loss(outputs, batch, surrogate=losses.sapo)[0].backward()
    gates = [1 / (1 + math.exp(-tau * 2)) for tau in (1.0, 1.05)]
    slopes = [3 * 4 * gate * (1 - gate) for gate in gates]
    assert outputs.logprobs.grad.tolist() == pytest.approx([-slopes[0], slopes[1]], rel=1e-5)


def test_the_low_variance_estimate_is_bounded():
    """At log ratios (reference over policy) of 99, 20, 2, -2, -10.5 and -99."""
    ratios = [99.0, 20.0, 2.0, -2.0, -10.5, -99.0]
    logprobs = torch.tensor([-r for r in ratios], requires_grad=True)
    kl = kl_k3(logprobs, torch.zeros(6))
    want = [10.0, 10.0, math.exp(2) - 3, math.exp(-2) + 1, math.exp(-10.5) + 9.5, 10.0]
    assert kl.tolist() == pytest.approx(want, rel=1e-6)
    kl.sum().backward()
    slopes = [0.0, 0.0, 1 - math.exp(2), 1 - math.exp(-2), 1 - math.exp(-10.5), 0.0]
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-6)


def test_corrections_by_hand():
    """Trainer over rollout 4, 1 and 1/4: truncated at 2, or left out beyond [1/2, 3]."""
    old, rollout = torch.tensor([math.log(4.0), 0.0, -math.log(4.0)]), torch.zeros(3)
    assert losses.truncated_importance(old, rollout).tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert losses.masked_importance(old, rollout, max_ratio=3.0).tolist() == [0.0, 1.0, 0.0]
    columns = {"old_logprobs": old.tolist(), "rollout_logprobs": [0.0] * 3, "advantages": [1.0] * 3}
    outputs = make_outputs(old.tolist())
    loss, metrics = policy_loss(outputs, make_batch([True] * 3, **columns), correction=losses.truncated_importance)
    loss.backward()
    assert outputs.logprobs.grad.tolist() == pytest.approx([-2.0, -1.0, -0.25])
    assert metrics["correction"].item() == pytest.approx(3.25)


@pytest.mark.parametrize(
    ("importance", "bounds", "want"),
    [
        ("truncated", (), [2.0, 0.25, 2.0, 1.5]),
        ("rejected", (0.2, 3.0), [0.0, 1.0, 1.0, 1.0]),
        ("sequence_truncated", (0.9,), [0.9, 0.9, 0.9, 0.9]),
        ("sequence_masked", (0.5, 2.0), [1.0, 1.0, 1.5, 1.5]),
        ("sequence_rejected", (1.2, 2.0), [0.0, 0.0, 1.0, 1.0]),
        ("geometric_rejected", (0.9, 1.1), [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_importance_of_tokens_and_sequences_by_hand(importance, bounds, want):
    """Trainer over rollout 4 and 1/4 in one sequence, whose product and mean are 1; 3/2 in the other, behind a prompt
    whose 2 counts for nothing."""
    old = torch.tensor([4.0, 0.25, 2.0, 1.5]).log()
    columns = {"old_logprobs": old.tolist(), "rollout_logprobs": [0.0] * 4, "advantages": [1.0] * 4}
    outputs, batch = make_outputs(old.tolist()), two_sequences(**columns)
    settings = AlgorithmConfig(importance=importance, importance_bounds=bounds)
    loss, metrics = configure_loss(settings, importance)(outputs, batch)
    loss.backward()
    counting = [w * m for w, m in zip(want, batch.mask.tolist())]
    assert outputs.logprobs.grad.tolist() == pytest.approx([-w for w in counting])
    assert metrics["correction"].item() == pytest.approx(sum(counting))
    assert metrics["rejected"].item() == sum(m and not w for w, m in zip(want, batch.mask.tolist()))


def test_a_sequence_far_from_the_trainer_is_left_out_and_not_nan():
    """The product of the ratios of 400 tokens is not a number of float32."""
    columns = {"old_logprobs": [-1.0] * 400, "rollout_logprobs": [-2.0] * 400, "advantages": [1.0] * 400}
    outputs = make_outputs([-1.0] * 400)
    loss, _ = configure_loss(AlgorithmConfig(importance="sequence_masked"), "sequence_masked")(
        outputs, make_batch([True] * 400, **columns)
    )
    assert loss.item() == 0


def test_aggregations_by_hand():
    """Two and one counting tokens: a third each; a half shared by two and a half; a constant of 2 * 10."""
    batch, loss = two_sequences(), torch.tensor([3.0, 6.0, 100.0, 12.0])
    for aggregation, want in (
        (losses.token_mean, 7.0),
        (losses.sequence_mean, (4.5 + 12) / 2),
        (partial(losses.constant_length, tokens=10), 21 / 20),
    ):
        weights, denominator = aggregation(batch)
        assert float((weights * loss).sum()) / denominator == pytest.approx(want)


def test_weights_are_what_a_loss_sums_with():
    columns = {"advantages": [1.0] * 4, "weights": [0.5, 0.5, 0.0, 1.0]}
    outputs = make_outputs([-1.0] * 4)
    loss, _ = policy_loss(outputs, two_sequences(**columns))
    loss.backward()
    assert outputs.logprobs.grad.tolist() == [-0.5, -0.5, 0.0, -1.0]


def test_value_loss_by_hand():
    """Value 2 after 1, return 3: half of 1. Held within 0.5 it is 1.5, half of 2.25, without a gradient."""
    columns = {"values": [1.0, 1.0, 0.0], "returns": [3.0, 0.0, 9.0]}
    batch = make_batch([True, True, False], **columns)
    values = torch.tensor([2.0, 2.0, 2.0], requires_grad=True)
    loss, metrics = value_loss(ValueOutputs(values), batch)
    assert loss.item() == pytest.approx(0.5 + 2.0) and metrics["value_loss"].item() == pytest.approx(2.5)
    loss.backward()
    assert values.grad.tolist() == [-1.0, 2.0, 0.0]
    values.grad = None
    loss, metrics = value_loss(ValueOutputs(values), batch, clip=0.5)
    # The second has moved away from its return, and counts as far as it has moved.
    assert loss.item() == pytest.approx(1.125 + 2.0) and metrics["value_clip_fraction"] == 2
    loss.backward()
    assert values.grad.tolist() == [0.0, 2.0, 0.0]


def test_the_settings_become_a_loss():
    batch = make_batch([True, True], old_logprobs=[0.0, 0.0], advantages=[1.0, -1.0], ref_logprobs=[0.0, 0.0])
    outputs = make_outputs([math.log(1.5), math.log(9.0)])
    settings = AlgorithmConfig(clip_high=0.3, dual_clip=4.0, entropy_coef=0.1, kl_coef=0.5)
    kl = sum(kl_k3(outputs.logprobs.detach(), torch.zeros(2)).tolist())
    assert configure_loss(settings)(outputs, batch)[0].item() == pytest.approx(-1.3 + 4.0 - 0.1 + 0.5 * kl)
    in_reward = AlgorithmConfig(clip_high=0.3, dual_clip=4.0, entropy_coef=0.1, kl_coef=0.5, kl_in="reward")
    assert configure_loss(in_reward)(outputs, batch)[0].item() == pytest.approx(-1.3 + 4.0 - 0.1)


SURROGATES = {
    "ppo": ppo,
    "dual clip": partial(ppo, dual_clip=3.0),
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "gmpo": losses.gmpo,
    "sapo": losses.sapo,
}
CORRECTIONS = {
    "none": None,
    "truncated": losses.truncated_importance,
    "masked": losses.masked_importance,
    "rejected": losses.rejected_importance,
}


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("apart", [89.0, 2000.0, -2000.0])
def test_tokens_however_far_apart_have_a_finite_loss_and_gradient(name, correction, apart):
    """exp(89) is infinite in float32, and 0 times it NaN: in the loss, in a gradient, or in a token beside the mask."""
    advantages, mask = [0.0, 1.0, -1.0, 1.0, 2.0], [True, True, True, False, True]
    columns = {"old_logprobs": [-apart] * 3 + [-apart, -0.5], "rollout_logprobs": [-2 * apart] * 4 + [-0.5]}
    batch = make_batch(mask, advantages=advantages, **columns)
    outputs = make_outputs([0.0] * 4 + [-0.5])
    surrogate, factor = SURROGATES[name], CORRECTIONS[correction]
    loss, metrics = policy_loss(outputs, batch, surrogate=surrogate, correction=factor)
    loss.backward()
    assert loss.isfinite() and outputs.logprobs.grad.isfinite().all()
    assert all(torch.as_tensor(value).isfinite().all() for value in metrics.values())
    assert outputs.logprobs.grad.square().sum().isfinite(), "the norm of a gradient is a sum of squares"


def test_masked_importance_is_zero_beyond_its_bounds():
    factors = losses.masked_importance(torch.tensor([0.0, 200.0, -200.0, 0.5]), torch.tensor([0.0, 0.0, 0.0, 0.0]))
    assert factors.tolist() == pytest.approx([1.0, 0.0, 0.0, math.exp(0.5)])
