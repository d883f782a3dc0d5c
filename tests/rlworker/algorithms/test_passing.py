"""Settings that reach a loss, a surrogate or an advantage which code passes, and those that are refused."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from rlworker.algorithms import losses
from rlworker.algorithms.advantages import gae, grpo, remax
from rlworker.algorithms.losses import kl_k2, policy_loss
from rlworker.algorithms.objective import configure_advantage, configure_loss
from rlworker.config.run import AlgorithmConfig, CriticConfig, RunConfig


def own_loss(outputs, batch):
    return outputs.logprobs.sum(), {}


def own_loss_of_settings(outputs, batch, *, kl_coef, entropy_coef=0.5, correction=None):
    return Tensor([kl_coef, entropy_coef, float(correction is losses.truncated_importance)]), {}


def own_surrogate(logprobs, old, batch):
    return logprobs, torch.zeros_like(batch.mask)


def compute(loss, kl_at: float = 0.5) -> float:
    """The loss of one token: ratio 1.5, advantage 1, entropy 1, a log ratio of ``kl_at`` to the reference."""
    logprobs = torch.tensor([math.log(1.5)])
    columns = dict(advantages=[1.0], old_logprobs=[0.0], ref_logprobs=[math.log(1.5) - kl_at])
    columns = {name: torch.tensor(value) for name, value in columns.items()}
    batch = TrainBatch.from_ids([(1, 2)], [1], rollout_logprobs=torch.tensor([-1.0]), **columns)
    return float(loss(TokenOutputs(logprobs, torch.ones(1)), batch)[0])


SET = AlgorithmConfig(clip_high=0.3, kl_coef=0.1, entropy_coef=0.01)


def test_a_loss_of_ours_that_code_passes_has_what_the_command_line_sets():
    """Clipped at 1.3, k2 of 0.5 is 0.125; the code's own kl_coef and surrogate stand where the user set neither."""
    assert compute(configure_loss(SET, loss=partial(policy_loss, kl=kl_k2))) == pytest.approx(-1.3 + 0.0125 - 0.01)
    bound = partial(policy_loss, kl=kl_k2, kl_coef=0.2)
    assert compute(configure_loss(AlgorithmConfig(), loss=bound)) == pytest.approx(-1.2 + 0.025)
    in_reward = AlgorithmConfig(kl_coef=0.1, kl_in="reward")
    assert compute(configure_loss(in_reward, loss=partial(policy_loss, kl=kl_k2))) == pytest.approx(-1.2)
    corrected = configure_loss(AlgorithmConfig(), "truncated", partial(policy_loss, kl=kl_k2))
    assert compute(corrected) == pytest.approx(-1.2 * 2), "of a rollout far from the trainer: truncated at 2"
    none = partial(policy_loss, correction=None)
    assert compute(configure_loss(AlgorithmConfig(), "truncated", none)) == pytest.approx(-1.2)


def test_another_surrogate_has_its_own_clips_until_they_are_set():
    gspo = partial(policy_loss, surrogate=losses.gspo)
    assert compute(configure_loss(AlgorithmConfig(), loss=gspo)) == pytest.approx(-(1 + 4e-4))
    assert compute(configure_loss(AlgorithmConfig(clip_high=0.1), loss=gspo)) == pytest.approx(-1.1)


def test_a_loss_of_another_kind_is_given_what_its_parameters_name():
    plain = AlgorithmConfig(kl_coef=0.1)
    assert configure_loss(plain, "truncated", own_loss_of_settings)(None, None)[0].tolist() == pytest.approx(
        [0.1, 0.5, 1]
    )
    nothing_set = configure_loss(AlgorithmConfig(), "none", own_loss_of_settings)
    assert nothing_set(None, None)[0].tolist() == [0.0, 0.5, 0.0]
    assert configure_loss(AlgorithmConfig(importance="none"), "none", own_loss) is own_loss


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (own_loss, dict(kl_coef=0.1), r"algorithm\.kl_coef is 0\.1, .* parameter kl_coef, or leave --algorithm\.kl"),
        (own_loss, dict(entropy_coef=0.1), "leave --algorithm.entropy-coef out"),
        (own_loss, dict(clip_low=0.1), "leave --algorithm.clip-low out"),
        (own_loss, dict(dual_clip=3.0), "leave --algorithm.dual-clip out"),
        (own_loss, dict(importance="truncated"), "leave --algorithm.importance out"),
        (partial(policy_loss, surrogate=own_surrogate), dict(clip_high=0.3), "surrogate: algorithm.clip_high is 0.3"),
        (partial(policy_loss, surrogate=losses.gspo), dict(dual_clip=3.0), "surrogate: algorithm.dual_clip is 3.0"),
        (partial(policy_loss, kl_coef=0.2), dict(kl_coef=0.1), r"binds kl_coef=0\.2 .* algorithm\.kl_coef,.* is 0\.1"),
        (partial(policy_loss, correction=None), dict(importance="truncated"), "binds correction=None .* algorithm"),
    ],
)
def test_a_setting_that_a_passed_loss_would_drop_is_refused_by_name(loss, settings, message):
    algorithm = AlgorithmConfig(**settings)
    with pytest.raises(ValueError, match=f"^loss: .*{message}|^loss: {message}"):
        configure_loss(algorithm, "truncated" if algorithm.importance == "truncated" else "none", loss)


def test_an_advantage_is_given_the_critics_settings():
    critic = RunConfig(critic=CriticConfig(train=True, gamma=0.9))
    for passed in (None, gae, partial(gae, lam=0.5)):
        found = configure_advantage(critic, passed)
        lam = 0.5 if passed not in (None, gae) else None
        assert found.keywords["gamma"] == 0.9 and found.keywords.get("lam") == lam
    untrained = RunConfig(critic=CriticConfig(gamma=0.9))
    assert configure_advantage(untrained, remax) is remax, "without a critic there is nothing to set"
    assert configure_advantage(RunConfig()) is grpo
    with pytest.raises(ValueError, match=r"^advantage: critic\.gamma is 0\.9, .*, or leave --critic\.gamma out"):
        configure_advantage(critic, remax)
    with pytest.raises(ValueError, match=r"^advantage: your code binds gamma=0\.5 .* critic\.gamma, .* is 0\.9"):
        configure_advantage(critic, partial(gae, gamma=0.5))
