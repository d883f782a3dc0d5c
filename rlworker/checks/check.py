"""``rlworker check``: proof on this machine that a model's numbers are right at these parallel sizes.

Masks are probed for leaks. Layouts are compared with each other and with HuggingFace, and the rollout's logprobs with
the trainer's, before and after a weight sync. All checks run through the engines of training.
"""

from collections.abc import Callable, Collection
from functools import partial

from ray.exceptions import RayError

from engines.batch.samples import Request, Sampling
from engines.batch.shard import get_logprobs
from hardware.megatron.form import NO_ROUTE
from hardware.platforms import get_platform
from rlworker.base.findings import Finding
from rlworker.checks.config import CheckConfig
from rlworker.checks.context import CheckedEngines, start_engines
from rlworker.checks.reference.huggingface import compare_outputs, probe_loss
from rlworker.checks.trainer import TRAINER_CHECKS, CheckedTrainer, judge_outputs, list_platform_limits
from rlworker.cluster.process_state import explain, get_last_line
from rlworker.cluster.watch import describe_lost, find_lost
from rlworker.rollouts.trajectory import replay_support, to_batch
from rlworker.trainers.agreement import SyncedWeights, compare_logprobs

_AWAY = {"float32": 1000.0, "bfloat16": 5.0}
"""Multiple of the limit by which other weights must move logprobs on average."""
_STEPS = 6
"""Most gradient steps that may be taken to move logprobs so far."""


def run_check(config: CheckConfig, tell: Callable[[str], None]) -> list[Finding]:
    """Start the engines, run every check once, end the engines and return the findings.

    Args:
        tell: is called with a line of text at the start of each part.
    """
    with start_engines(config, tell) as engines:
        return [*check_all(engines, version=1), *list_platform_limits(get_platform(config.platform))]


def check_all(engines: CheckedEngines, version: int, only: Collection[str] = ()) -> list[Finding]:
    """Run every check, in an order in which a failure explains later ones, and return the findings.

    A worker that raises makes its check fail, with the error in the finding. Other ranks may still wait for it in a
    collective, so no later check calls several ranks.

    Args:
        version: version under which ``check_weight_sync`` sends new weights; ``version + 1`` is used as well.
        only: names of the checks to run; empty runs all.
    """
    findings: list[Finding] = []
    checks = {name: partial(check, engines.trainer) for name, check in TRAINER_CHECKS.items()}
    if engines.config.actor.lora.rank:
        checks["merge"] = partial(_check_merge, engines.trainer)
    checks |= {
        "rollout": partial(_compare_rollouts, engines, "rollout", "against trainer"),
        "weight sync": partial(check_weight_sync, engines, version),
    }
    for name, check in checks.items():
        if only and name not in only:
            continue
        try:
            findings += check()
        except RayError as error:
            # A rank that dies makes others fail, in the collective that it left, and their errors may come first.
            lost = find_lost(engines.name_workers())
            text = f"raised: {describe_lost(lost) or explain(error) or get_last_line(error)}"
            if engines.config.actor.ranks > 1:
                text += "; the checks after it were not run"
                return [*findings, engines.trainer.make_finding(name, "", False, text)]
            findings.append(engines.trainer.make_finding(name, "", False, text))
    return findings


def _check_merge(trainer: CheckedTrainer) -> list[Finding]:
    """Check that weights with adapters merged into them compute what both do beside each other. In bfloat16 the merge
    rounds weights anew: the text tells how far that moves logprobs."""
    kind = trainer.settings.layout
    trainer.tell(f"merge: {kind}")
    merged = next(part for part in trainer.call_ranks("compute_merged", kind, trainer.case.batch) if part)
    passed, text = judge_outputs(trainer, compare_outputs(merged, trainer.compute_outputs(kind)))
    return [trainer.make_finding("merge", f"{kind}, adapters in the weights", passed, text)]


def check_weight_sync(engines: CheckedEngines, version: int) -> list[Finding]:
    """Send weights of a further step as ``version``, compare the weights that rollout engines compute with, and
    logprobs of samples, and send the first weights back."""
    trainer = engines.trainer
    try:
        moved, target = _move_weights(engines)
        trainer.tell("weight sync: other weights are sent")
        weights = SyncedWeights(engines.config.rollout.dtype, bool(engines.config.actor.lora.rank))
        weights.send(engines.actor, engines.rollouts.workers, version)
        unlike = weights.compare(engines.rollouts)
        text = unlike or "no tensor that can be read differs from the one that was sent"
        findings = [trainer.make_finding("weight sync", "read back", not unlike, text)]
        findings += _compare_rollouts(engines, "weight sync", "after new weights")
        passed, text = moved >= target, f"logprobs moved by {moved:.1e} on average, expected {target:.1e}"
        findings.append(trainer.make_finding("weight sync", "new weights", passed, text))
    finally:
        trainer.call_ranks("restore_weights")
        send_weights(engines, version + 1)
    return findings


def _move_weights(engines: CheckedEngines) -> tuple[float, float]:
    """Go down the gradient until logprobs have moved far beyond the limit: by how much, and by how much they had to."""
    trainer, actor = engines.trainer, engines.config.actor
    target = _AWAY["float32" if engines.is_exact else "bfloat16"] * engines.rollout_limits[0]
    trainer.tell("weight sync: a step is taken")
    before = trainer.compute_outputs(actor.layout)
    case = actor.layout, trainer.case.batch, probe_loss, trainer.case.denominator
    squares = trainer.call_ranks("take_gradients", *case)
    # To first order a step of this rate lowers the mean loss, which is logprobs times about 1, by the target.
    rate, taken, moved = target / sum(squares), 0.0, 0.0
    for _ in range(_STEPS):
        trainer.call_ranks("step_weights", rate)
        taken += rate
        moved = compare_outputs(trainer.compute_outputs(actor.layout), before)["logprob mean"]
        if moved >= target:
            break
        rate = taken * min(1.1 * target / moved - 1, 1.0) if moved else taken
    trainer.call_ranks("step_biases")  # last: they move logprobs far, whatever the weights do
    return moved, target


def send_weights(engines: CheckedEngines, version: int) -> None:
    """Send the actor's weights to every rollout engine under check, as version ``version``.

    In a run, ``Trainer.sync_weights`` does this, and raises the version itself.
    """
    engines.actor.sync_weights(engines.rollouts.workers, version)


def _compare_rollouts(engines: CheckedEngines, check: str, where: str) -> list[Finding]:
    """Compare each rollout engine's logprobs of its own samples against the trainer's, at the weights that both
    have."""
    engines.trainer.tell(f"{check}: samples {where}")
    config, trainer, count = engines.config.rollout, engines.trainer, len(engines.rollouts.workers)
    # Enough for every replica to have a share, and the same for every engine.
    rows = trainer.case.rows * (count * engines.actor.dp_size)
    sampling = Sampling(2, config.temperature, config.max_new_tokens, stream=(1,), stop_token_ids=())
    requests = [Request(row.prompt_ids, sampling, row.images) for row in rows]
    samples = engines.rollouts.sample(requests, sampling.stream, equal_shares=True)
    batch = to_batch(rows, samples, [0.0] * (2 * len(rows)), trainer.model.vision)
    if config.top_k:
        batch = replay_support(batch)
    logprobs = get_logprobs(engines.actor.forward(batch))
    findings, start, limits = [], 0, engines.rollout_limits
    for number, part in enumerate(batch.split(count)):
        difference = compare_logprobs(part, logprobs[start : start + part.num_tokens])
        start += part.num_tokens
        sampled = part.require_column("rollout_logprobs")
        signed = (sampled - logprobs[start - part.num_tokens : start])[part.mask]
        found = difference["logprob_diff_mean"], abs(float(signed.mean())), difference["logprob_diff_max"]
        shown = ", ".join(f"{name} {value:.1e}" for name, value in zip(("mean", "bias", "max"), found))
        text = f"{shown}, limits {', '.join(f'{limit:.0e}' for limit in limits)}"
        if "logprob_diff_images_max" in difference:
            text += "; after images mean {logprob_diff_images_mean:.1e}, max {logprob_diff_images_max:.1e}".format(
                **difference
            )
        passed = all(value <= limit for value, limit in zip(found, limits, strict=True))
        if part.routes is not None:
            unknown = int((part.routes == NO_ROUTE).all(2).all(1).sum())
            passed, text = passed and not unknown, f"{text}; {unknown} tokens without routes"
        place = where if count == 1 else f"{where}, engine {number}"
        findings.append(trainer.make_finding(check, place, passed, text))
    return findings
