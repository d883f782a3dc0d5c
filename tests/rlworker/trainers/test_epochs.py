"""Epochs over a rollout around a fake actor, whose logprobs move by a fixed step with each update."""

import math

import pytest
import torch

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from rlworker.algorithms.objective import make_objective
from rlworker.config.run import AlgorithmConfig, RunConfig
from rlworker.config.sections import LimitsConfig

MOVE = 0.1


class MovingActor:
    """An actor whose log ratios are ``MOVE`` times the optimizer steps that it took."""

    name = "actor"

    def __init__(self):
        self.sizes = []

    def train_step(self, batch: TrainBatch, loss, denominator: float):
        outputs = TokenOutputs(batch.old_logprobs + MOVE * len(self.sizes), torch.zeros(batch.num_tokens))
        self.sizes.append(len(batch))
        return {"grad_norm": 1.0, "ratio_max": float(loss(outputs, batch)[1]["ratio_max"])}, outputs


def update(limit: float | None) -> tuple[dict[str, float], list[int]]:
    """Five epochs of two mini-batches over four sequences: metrics, and the sequences of each optimizer step."""
    from rlworker.trainers.rl import Trainer

    trainer = Trainer.__new__(Trainer)
    algorithm, limits = AlgorithmConfig(epochs=5, mini_batches=2), LimitsConfig(epoch_kl=limit)
    trainer.config = RunConfig(algorithm=algorithm, limits=limits, prompts_per_step=2, samples_per_prompt=2)
    trainer.objective, trainer.actor, trainer.critic = make_objective(trainer.config), MovingActor(), None
    trainer.steps_done, trainer.floor, trainer.version = 0, None, 1
    old = torch.full((8,), -1.0)
    versions = torch.ones(8, dtype=torch.int32)
    columns = dict(old_logprobs=old, rollout_logprobs=old, advantages=torch.ones(8), versions=versions)
    batch = TrainBatch.from_ids([[5, 6, 7]] * 4, [1] * 4, **columns)
    return trainer._update(batch), trainer.actor.sizes


def compute_kl(*moves: int) -> float:
    """The mean of r - 1 - log r over optimizer steps."""
    return sum(math.exp(MOVE * n) - 1 - MOVE * n for n in moves) / len(moves)


@pytest.mark.parametrize(
    ("limit", "epochs"),
    [(None, 5), (compute_kl(4, 5) + 1e-4, 4), (compute_kl(4, 5) - 1e-4, 3), (compute_kl(0, 1) / 2, 1)],
)
def test_epochs_end_where_the_policy_has_moved_too_far(limit, epochs):
    metrics, sizes = update(limit)
    assert (metrics["epochs"], sizes) == (epochs, [2] * 2 * epochs)
    assert metrics["policy_kl"] == pytest.approx(compute_kl(*range(2 * epochs)), rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(math.exp(MOVE * (2 * epochs - 1)), rel=1e-5)
    assert metrics["logprob_diff_mean"] == 0, "of the weights that sampled"


def test_every_epoch_is_a_part_of_the_decay():
    config = RunConfig(algorithm=AlgorithmConfig(epochs=3, mini_batches=2), steps=10)
    assert config.actor_of_run.optimizer.lr_decay_steps == 60
    with pytest.raises(ValueError, match=r"limits.epoch_kl=0\.1 can only end epochs .*, and algorithm\.epochs is 1"):
        RunConfig(limits=LimitsConfig(epoch_kl=0.1))
