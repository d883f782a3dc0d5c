import math

import pytest
import torch

from engines.batch import TrainBatch
from engines.interfaces import TokenOutputs
from rlworker.losses import kl_low_variance, policy_loss, sft_loss


def batch_of(mask, **columns) -> TrainBatch:
    n = len(mask)
    zeros = torch.zeros(n, dtype=torch.long)
    tensors = {name: torch.tensor(value) for name, value in columns.items()}
    return TrainBatch((n,), zeros, zeros, zeros, torch.tensor(mask), **tensors)


def outputs_of(logprobs) -> TokenOutputs:
    return TokenOutputs(torch.tensor(logprobs, requires_grad=True), torch.full((len(logprobs),), 0.5))


def test_clipped_surrogate_by_hand():
    """Ratios 1.5, 0.5, 1.5, 0.5 against a clip of 0.2: the gain is the smaller of clipped and not."""
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 9.0], [1.0, 1.0, -1.0, -1.0, 5.0]
    batch = batch_of([True] * 4 + [False], old_logprobs=[-1.0] * 5, advantages=advantages)
    outputs = outputs_of([-1.0 + math.log(r) for r in ratios])
    loss, metrics = policy_loss(outputs, batch)
    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8))
    assert metrics["clip_fraction"] == 4 and metrics["ratio_max"].item() == pytest.approx(1.5)
    assert metrics["entropy"].item() == pytest.approx(2.0)
    loss.backward()
    # Gradient of -ratio * A is -ratio * A where the unclipped side is taken, zero where the clip holds.
    assert outputs.logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, 0.0])


def test_asymmetric_clip():
    batch = batch_of([True, True], old_logprobs=[0.0, 0.0], advantages=[1.0, -1.0])
    loss, _ = policy_loss(outputs_of([math.log(1.5), math.log(0.5)]), batch, clip_low=0.1, clip_high=0.3)
    assert loss.item() == pytest.approx(-1.3 + 0.9)


def test_without_old_logprobs_the_gradient_is_reinforce():
    batch = batch_of([True, True, False], advantages=[2.0, -3.0, 7.0])
    outputs = outputs_of([-1.0, -2.0, -3.0])
    loss, metrics = policy_loss(outputs, batch)
    loss.backward()
    assert outputs.logprobs.grad.tolist() == [-2.0, 3.0, 0.0]
    assert metrics["clip_fraction"] == 0


def test_kl_by_hand():
    d = math.log(2.0)
    assert kl_low_variance(torch.tensor([-1.0]), torch.tensor([-1.0 + d])).item() == pytest.approx(2 - 1 - d)
    batch = batch_of([True, False], advantages=[0.0, 0.0], ref_logprobs=[-1.0 + d, 0.0])
    loss, metrics = policy_loss(outputs_of([-1.0, -1.0]), batch, kl_coef=0.3)
    assert loss.item() == pytest.approx(0.3 * (1 - d)) and metrics["kl"].item() == pytest.approx(1 - d)


def test_sft_counts_the_mask_only():
    loss, metrics = sft_loss(outputs_of([-1.0, -2.0, -4.0]), batch_of([True, False, True]))
    assert loss.item() == 5.0 and metrics["loss"].item() == 5.0


def test_sums_add_up_over_any_cut():
    torch.manual_seed(0)
    sequences = [torch.randint(0, 9, (n,)).tolist() for n in (4, 2, 7, 3)]
    batch = TrainBatch.from_ids(sequences, [1] * 4)
    n = batch.num_tokens
    columns = {name: torch.randn(n) for name in ("old_logprobs", "advantages", "ref_logprobs")}
    batch = TrainBatch(lengths=batch.lengths, **batch.columns() | columns)
    outputs = TokenOutputs(torch.randn(n), torch.rand(n))
    whole, whole_metrics = policy_loss(outputs, batch, kl_coef=0.1)
    total, first, metrics = 0.0, 0, {}
    for part in batch.split(3):
        cut = slice(first, first + part.num_tokens)
        first += part.num_tokens
        loss, sums = policy_loss(TokenOutputs(outputs.logprobs[cut], outputs.entropy[cut]), part, kl_coef=0.1)
        total += loss.item()
        for name, value in sums.items():
            metrics.setdefault(name, []).append(float(value))
    assert total == pytest.approx(whole.item(), rel=1e-5)
    for name, values in metrics.items():
        together = max(values) if name.endswith("_max") else sum(values)
        assert together == pytest.approx(float(whole_metrics[name]), rel=1e-5)
