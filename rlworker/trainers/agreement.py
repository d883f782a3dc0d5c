"""The checks that rollout engines and trainer agree: on the weights, and on the logprobs of the same tokens."""

import math
from collections.abc import Mapping, Sequence

import torch
from ray.actor import ActorHandle

from engines.batch.batch import TrainBatch
from engines.weight_digest import DigestPlan
from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import WorkerGroup
from rlworker.cluster.watch import wait_for
from rlworker.cluster.workers import RolloutWorker
from rlworker.config.run import RunConfig

_SAMPLED_COLUMNS = 16
"""Number of columns of each matrix that are read back, where not all columns are."""
_NAMED = 4
"""Most tensors that a message names."""

Read = Mapping[str, int | None]
"""Name of a tensor -> digest of the weights that an engine computes with; None if they cannot be read back."""


class SyncedWeights:
    """Sends weights to rollout engines, and compares digests of the sent weights with those that the engines compute
    with.

    All weights of the first sync are read back, and of each later sync another sample of columns.

    Args:
        dtype: type of the rollout engines' weights.
        has_adapters: whether the actor has adapters, which are merged into what it sends.
    """

    def __init__(self, dtype: str, has_adapters: bool = False):
        self._dtype, self._has_adapters = dtype, has_adapters
        self._plan: DigestPlan | None = None
        self._sent: dict[str, int] = {}
        self._frozen = ""

    def send(self, actor: WorkerGroup, engines: Sequence[ActorHandle], version: int) -> None:
        """Send the actor's weights to all rollout engines as ``version``."""
        self._plan = DigestPlan(self._dtype, _SAMPLED_COLUMNS if self._plan else 0, version)
        self._sent = actor.sync_weights(engines, version, self._plan)
        self._frozen = _describe_frozen(actor, self._plan, self._sent) if self._has_adapters else ""

    def compare(self, rollouts: Rollouts) -> str:
        """Describe which weights of rollout engines differ from the weights that were sent, or were sent without their
        adapters; empty where all are right."""
        assert self._plan, "send comes first"
        read: Sequence[Read] = rollouts.call(RolloutWorker.digest_weights, self._plan)
        unread = sorted({name for each in read for name, digest in each.items() if digest is None})
        if unread and not self._plan.columns:
            LOGGER.warning(
                f"weight sync: {len(unread)} of {len(self._sent)} tensors cannot be read back from vLLM, such as "
                f"{unread[0]}: whether they arrive is shown by logprobs alone"
            )
        return "; ".join(filter(None, (self._frozen, _describe_unlike(self._sent, read))))

    def send_to_new(self, actor: WorkerGroup, engines: Sequence[ActorHandle], version: int) -> str:
        """Send the actor's weights to engines that replace lost ones, and compare all of them as ``compare`` does."""
        plan = DigestPlan(self._dtype)
        sent = actor.sync_weights(engines, version, plan)
        return _describe_unlike(sent, wait_for([engine.digest_weights.remote(plan) for engine in engines]))


def _describe_frozen(actor: WorkerGroup, plan: DigestPlan, sent: Mapping[str, int]) -> str:
    frozen = [
        name for names in actor.run("engines.megatron.extensions.adapters:list_frozen", plan, sent) for name in names
    ]
    return (
        f"weights were sent without their adapters, as the model's folder has them: {', '.join(frozen)}"
        if frozen
        else ""
    )


def _describe_unlike(sent: Mapping[str, int], engines: Sequence[Read]) -> str:
    parts = []
    for number, read in enumerate(engines):
        unlike = [name for name, digest in sent.items() if read[name] not in (None, digest)]
        if unlike:
            names = ", ".join(unlike[:_NAMED]) + (", ..." if len(unlike) > _NAMED else "")
            of = f" of engine {number}" if len(engines) > 1 else ""
            parts.append(f"{len(unlike)} of {len(sent)} tensors{of} are not those that were sent: {names}")
    return "; ".join(parts)


def describe_limits(config: RunConfig, floor: float | None) -> str:
    """Describe which differences of logprobs end the run, and the floor from which the limits follow."""
    mean, largest = config.find_logprob_limits(floor)
    text = f"limits: the mean |rollout - trainer logprob| may be {mean:.1e}"
    text += f", the largest {largest:.1e}" if math.isfinite(largest) else ""
    return text if floor is None else f"{text}; by rounding alone it is {floor:.1e} before the first step"


def check_agreement(
    config: RunConfig, floor: float | None, where: str, difference: Mapping[str, float], unlike: str = ""
) -> None:
    """Check that rollout engines and trainer agree, and end the run or warn where they do not.

    Args:
        floor: difference by rounding alone, from ``Canary.measure_floor``; None where it was not measured.
        where: step or sync, for the message.
        difference: result of ``compare_logprobs``; empty where no token was compared.
        unlike: result of ``SyncedWeights.compare``; empty where no weights differ.

    Raises:
        RunError: they disagree, and ``limits.ignore_logprob_diff`` is off.
    """
    limits, parts = config.find_logprob_limits(floor), [unlike] if unlike else []
    measured = [difference.get(f"logprob_diff_{name}", 0.0) for name in ("mean", "max")]
    if not all(value <= limit for value, limit in zip(measured, limits, strict=True)):
        parts.append(
            f"rollout and trainer disagree on the logprobs of the same tokens: mean {measured[0]:.1e}, max "
            f"{measured[1]:.1e}, limits {limits[0]:.1e} and {limits[1]:.1e}"
        )
    if not parts:
        return
    text = f"{where}: {'; '.join(parts)}. Weights did not arrive whole, or the engines compute different models"
    if config.limits.ignore_logprob_diff:
        LOGGER.warning(text)
        return
    raise RunError(
        f"{text}; to go on all the same raise --limits.logprob-diff-mean or set --limits.ignore-logprob-diff"
        if not unlike
        else f"{text}; to go on all the same set --limits.ignore-logprob-diff"
    )


def compare_logprobs(batch: TrainBatch, logprobs: torch.Tensor, version: int | None = None) -> dict[str, float]:
    """Measure |rollout - trainer logprob| over the sampled tokens, both computed from the same weights.

    Args:
        logprobs: the trainer's, ``[N]``.
        version: version of the trainer's weights; tokens that other versions sampled are left out. None takes all
            tokens.

    Returns:
        ``logprob_diff_mean`` and ``logprob_diff_max``, and where some sequences have images also
            ``logprob_diff_images_mean`` and ``logprob_diff_images_max``; empty without a token.
    """
    mask = batch.mask if version is None else batch.mask & (batch.require_column("versions") == version)
    if not mask.any():
        return {}
    difference = (batch.require_column("rollout_logprobs") - logprobs)[mask].abs()
    result = {"logprob_diff_mean": float(difference.mean()), "logprob_diff_max": float(difference.max())}
    if batch.images and any(batch.images):
        has_images = batch.repeat_per_token(torch.tensor([bool(images) for images in batch.images]))[mask]
        if not has_images.any():
            return result
        seeing = difference[has_images]
        result |= {"logprob_diff_images_mean": float(seeing.mean()), "logprob_diff_images_max": float(seeing.max())}
    return result
