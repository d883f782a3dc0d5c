"""Choose the functions that a run learns by: those that code passes, and the algorithm's for the others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.interfaces import LossFn
from engines.validation import option
from rlworker.algorithms import advantages, losses
from rlworker.algorithms.advantages import AdvantageFn, add_kl_penalty, add_overlong_penalty, limit_episodes
from rlworker.algorithms.losses import Aggregation, Correction, KlEstimate, policy_loss, value_loss
from rlworker.algorithms.passing import PassedFunction
from rlworker.base.errors import RunError
from rlworker.config.algorithm import Algorithm, AlgorithmConfig, Importance, split_importance
from rlworker.config.run import RunConfig

_CLIPS = dict(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
"""Clips for a user's loss that has parameters for them, where no setting sets them."""


@dataclass(frozen=True)
class Objective:
    """The functions that a run learns by, with their settings bound.

    Attributes:
        advantage, loss, aggregation: as ``Trainer`` takes them.
        value_loss: loss of the critic.
        penalize: adds the penalties of the reward to a batch that has logprobs.
        trains_critic: whether the advantage also returns the critic's targets.
        find_teaching: tells of each group, ``[P]`` bool, whether its rewards teach: whether an advantage is not 0, the
            KL penalty aside. None where the advantage does not follow from rewards alone.
    """

    advantage: AdvantageFn
    loss: LossFn
    aggregation: Aggregation
    value_loss: LossFn = value_loss
    penalize: Callable[[TrainBatch], TrainBatch] = lambda batch: batch
    trains_critic: bool = False
    find_teaching: Callable[[TrainBatch], Tensor] | None = None

    def add_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with penalties and advantages, and with the critic's returns if a critic is trained."""
        batch = self.penalize(batch)
        result = self.advantage(batch)
        if isinstance(result, tuple) != self.trains_critic:
            raise RunError(
                "advantage: with --critic.train it must return ([N] advantages, [N] returns), else [N], got "
                f"a {type(result).__name__}"
            )
        columns, returns = result if isinstance(result, tuple) else (result, None)
        try:
            return replace(batch, advantages=columns, returns=returns)
        except ValueError as error:
            raise RunError(f"advantage: {self.advantage!r:.80} returned other columns than [N]: {error}") from error


def make_objective(
    config: RunConfig,
    advantage: AdvantageFn | None = None,
    loss: LossFn | None = None,
    aggregation: Aggregation | None = None,
) -> Objective:
    """Choose the functions of a run, and bind the settings that they take.

    Args:
        advantage, loss, aggregation: functions from the user's code; None takes the algorithm's.

    Raises:
        ValueError: a setting and the user's code contradict each other; the advantage has nothing to compare; or the
            loss needs logprobs that are not recorded.
    """
    chosen = configure_advantage(config, advantage)
    check_group_size(chosen, config.samples_per_prompt)
    named = import_distillation().reverse_kl if config.distill.top_k else policy_loss
    minimised = configure_loss(config.algorithm, config.importance, loss or named)
    check_centering(minimised, config.algorithm)
    limits = dict(sample_tokens=config.rollout.max_new_tokens, sequence_tokens=config.longest)
    parts, find_teaching = config.algorithm.parts, None
    function: Any = PassedFunction(chosen, "advantage").inner
    if getattr(function, "from_rewards", False):
        penalize = partial(penalize_reward, algorithm=replace(parts, kl_coef=0.0), **limits)
        find_teaching = partial(find_teaching_groups, advantage=chosen, penalize=penalize)
    return Objective(
        chosen,
        minimised,
        choose_aggregation(config, aggregation),
        partial(value_loss, clip=config.critic.clip),
        partial(penalize_reward, algorithm=parts, **limits),
        config.trains_critic,
        find_teaching,
    )


def import_distillation():
    """Import what only a run with a reference or teachers needs."""
    from rlworker.algorithms import distillation

    return distillation


def find_teaching_groups(
    batch: TrainBatch, advantage: AdvantageFn, penalize: Callable[[TrainBatch], TrainBatch]
) -> Tensor:
    """Find the groups that have an advantage other than 0, ``[P]`` bool; ``penalize`` lowers rewards before."""
    advantages = advantage(penalize(batch))
    assert isinstance(advantages, Tensor), "it follows from rewards alone"
    sequences = batch.sum_per_sequence((advantages * batch.mask).abs())  # [B]
    group = batch.require_column("group")
    return torch.zeros(int(group.max()) + 1).index_add_(0, group, sequences) > 0


def configure_advantage(config: RunConfig, advantage: AdvantageFn | None = None) -> AdvantageFn:
    """Choose the advantage. If a critic is trained, bind the critic's settings that the advantage has parameters for.

    Raises:
        ValueError: the user set a value that the advantage does not take, or that the code sets otherwise.
    """
    _refuse_both("advantage", advantage, config.algorithm)
    name = "gae" if config.trains_critic else config.algorithm.parts.advantage
    passed, critic = PassedFunction(advantage or getattr(advantages, name), "advantage"), config.critic
    if config.trains_critic:
        passed.give_settings("critic", type(critic)(), gamma=critic.gamma, lam=critic.lam)
    return passed.build()


def check_group_size(advantage: AdvantageFn, samples_per_prompt: int) -> None:
    """Raise ValueError where a group-relative advantage would have nothing to compare."""
    function: Any = PassedFunction(advantage, "advantage").inner
    if samples_per_prompt == 1 and getattr(function, "group_relative", False):
        raise ValueError(
            f"config: samples_per_prompt=1 leaves {function.__name__} nothing to compare a completion with, so that "
            "every advantage is 0; raise --samples-per-prompt, or take an advantage that needs no group (a critic's, "
            "remax, reinforce_plus_plus)"
        )


def choose_aggregation(config: RunConfig, aggregation: Aggregation | None = None) -> Aggregation:
    """Choose the aggregation, which weighs tokens; ValueError if both the user's settings and the code do."""
    algorithm = config.algorithm
    _refuse_both("aggregation", aggregation, algorithm)
    if aggregation:
        return aggregation
    if algorithm.parts.aggregation == "constant_length":
        return partial(losses.constant_length, tokens=config.rollout.max_new_tokens)
    return getattr(losses, algorithm.parts.aggregation)


def configure_loss(algorithm: AlgorithmConfig, importance: Importance = "none", loss: LossFn = policy_loss) -> LossFn:
    """Bind the settings that a loss has keyword parameters for, and the algorithm's surrogate in ``policy_loss``.

    A surrogate of the user's code does not get the clips of the named algorithm. A loss with a parameter ``correction``
    gets the importance weight of the settings, unless the code binds one.

    Args:
        importance: kind of weight, ``RunConfig.importance``.

    Raises:
        ValueError: the user set a value that the loss does not take, or that the code sets otherwise.
    """
    passed, parts = PassedFunction(loss, "loss"), algorithm.parts
    own = dict(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip)
    if passed.inner is policy_loss:
        _give_surrogate(passed, algorithm, own)
    else:
        for name, value in own.items():
            named = getattr(parts, name)
            passed.give(name, _CLIPS[name] if named is None else named, f"algorithm.{name}", value is not None)
        passed.give("surrogate", None, "algorithm.surrogate", algorithm.surrogate is not None)
    if parts.kl_in == "loss":
        is_named = parts.kl_coef > 0 and "kl_coef" not in passed.bound
        is_set = bool(algorithm.kl_coef) or (algorithm.kl_coef is not None and passed.takes("kl_coef"))
        passed.give("kl_coef", parts.kl_coef, "algorithm.kl_coef", is_set or is_named)
        if estimate := parts.kl_estimate:
            is_named = passed.takes("kl") and "kl" not in passed.bound
            is_set = algorithm.kl_estimate is not None or is_named
            passed.give("kl", find_kl_estimate(estimate), "algorithm.kl_estimate", is_set)
    else:
        passed.give("kl_coef", 0.0, "algorithm.kl_coef", False)
    passed.give_settings("algorithm", AlgorithmConfig(), **algorithm.loss_settings)
    _give_correction(passed, algorithm, importance)
    return passed.build()


def _give_surrogate(passed: PassedFunction, algorithm: AlgorithmConfig, own: dict[str, Any]) -> None:
    """Give ``policy_loss`` its surrogate, and the surrogate its parameters.

    Args:
        own: clips by name, as the user set them; None where not.
    """
    function = getattr(losses, algorithm.parts.surrogate)
    is_of_code = "surrogate" in passed.bound
    passed.give("surrogate", function, "algorithm.surrogate", algorithm.surrogate is not None)
    surrogate = PassedFunction(passed.bound["surrogate"] if is_of_code else function, "loss: surrogate")
    for name, value in own.items():
        value = value if is_of_code else getattr(algorithm.parts, name)
        surrogate.give(name, value, f"algorithm.{name}", value is not None)
    if surrogate.given or not is_of_code:
        passed.given["surrogate"] = surrogate.build()
    if "center" not in passed.bound:
        passed.given["center"] = algorithm.score_centering > 0


def _give_correction(passed: PassedFunction, algorithm: AlgorithmConfig, importance: Importance) -> None:
    if not passed.takes("correction") and algorithm.importance in ("auto", "none"):
        return
    correction = choose_correction(algorithm, importance)
    is_set = algorithm.importance != "auto" or (correction is not None and "correction" not in passed.bound)
    passed.give("correction", correction, "algorithm.importance", is_set)
    level, _ = split_importance(importance)
    passed.give("importance_level", level, "algorithm.importance", level != "token")


def choose_correction(algorithm: AlgorithmConfig, importance: Importance) -> Correction | None:
    """Return the function of an importance weight, with the bounds that are set; None for ``none``."""
    if importance == "none":
        return None
    function = cast(Correction, getattr(losses, f"{split_importance(importance)[1]}_importance"))
    bounds = dict(zip(("max_ratio", "min_ratio"), reversed(algorithm.importance_bounds), strict=False))
    return partial(function, **bounds) if bounds else function


def find_kl_estimate(name: str) -> KlEstimate:
    """Return the KL estimate that settings call ``name``, such as ``k1``."""
    return getattr(losses, f"kl_{name}")


def penalize_reward(batch: TrainBatch, algorithm: Algorithm, sample_tokens: int, sequence_tokens: int) -> TrainBatch:
    """Return the batch with the algorithm's penalties on rewards: for length, and for KL to the reference.

    Args:
        sample_tokens, sequence_tokens: most tokens of a sample and of a sequence.
    """
    if algorithm.overlong_buffer:
        limits = limit_episodes(batch, sample_tokens, sequence_tokens)
        buffers = (algorithm.overlong_buffer * limits).round().clamp_min(1)
        batch = add_overlong_penalty(batch, limits, buffers)
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        batch = add_kl_penalty(batch, algorithm.kl_coef, find_kl_estimate(algorithm.kl_estimate or "k1"))
    return batch


def check_centering(loss: LossFn, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError if ``policy_loss`` and ``algorithm.score_centering`` do not fit; other losses pass."""
    passed = PassedFunction(loss, "loss")
    if passed.inner is not policy_loss:
        return
    center, top = passed.bound.get("center", False), algorithm.score_centering
    if center != (top > 0):
        raise ValueError(
            f"loss: your code binds center={center}, which needs {'a number above 0' if center else 0} in "
            f"--algorithm.score-centering, but algorithm.score_centering is {top}; change that setting, or leave "
            "center out in the code, so that it follows the setting"
        )
    if center:
        losses.refuse_sequence_ratio(passed.bound.get("surrogate", losses.ppo))


def _refuse_both(part: str, function: Callable | None, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError where code passes a part and the user sets it too."""
    if function and (name := getattr(algorithm, part)):
        raise ValueError(
            f"{part}: the code passes a function, and algorithm.{part} is {name!r}; leave the argument out in the "
            f"code, or leave {option('algorithm', part)} out"
        )
