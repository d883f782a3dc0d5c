"""Changes of settings that would make a step shorter, each tried by the forecast, and the forecast as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hardware.machines import MACHINES, Machine
from hardware.platforms import get_platform
from rlworker.checks.plan.forecast import Forecast, Models, forecast_step
from rlworker.config.memory import GB, list_needs
from rlworker.config.run import RunConfig, TrainingConfig

_LEAST = 0.01
"""Least part of a step that a change must save to be named."""


@dataclass(frozen=True)
class Change:
    """A change of settings that takes no further device.

    Attributes:
        options: as on the command line. forecast: of the changed run.
    """

    options: str
    config: RunConfig
    forecast: Forecast


def list_changes(config: RunConfig, models: Models, machine: Machine) -> list[Change]:
    """List the changes that make a step shorter and fit into the machine's memory, the largest gain first; of several
    values of a setting the best."""
    before = forecast_step(config, models, machine)
    found = []
    for options, make in _list_candidates(config, models):
        try:
            changed = make()
            for model in models.values():
                changed.actor.check_model(model)
            changed.rollout.check_cut(models["actor"])
        except ValueError:
            continue
        needs = list_needs(changed, dict(models))
        if all(need.total <= machine.memory_gb * GB for need in needs):
            found.append(Change(options, changed, forecast_step(changed, models, machine)))
    best: dict[tuple[str, ...], Change] = {}
    for change in sorted(found, key=lambda change: change.forecast.step):
        if change.forecast.step < (1 - _LEAST) * before.step:
            best.setdefault(tuple(word for word in change.options.split() if word.startswith("--")), change)
    return list(best.values())


def _list_candidates(config: RunConfig, models: Models) -> Iterator[tuple[str, Callable[[], RunConfig]]]:
    actor, rollout = config.actor, config.rollout

    def change_actor(**changes):
        return lambda: replace(config, actor=replace(actor, **changes))

    def change_rollout(**changes):
        return lambda: replace(config, rollout=replace(rollout, **changes))

    if not config.placement.colocate:
        yield f"--rollout.staleness {rollout.staleness + 1}", change_rollout(staleness=rollout.staleness + 1)
        for moved in (1, 2, 4, 8, 16):
            unit = actor.tp * actor.pp * actor.cp * moved
            engines = rollout.engines + unit // rollout.tp, rollout.engines - unit // rollout.tp
            for ranks, count in zip((actor.ranks - unit, actor.ranks + unit), engines, strict=True):
                if ranks > 0 and count > 0 and not unit % rollout.tp:
                    changed = replace(actor, ranks=ranks), replace(rollout, engines=count)
                    yield (
                        f"--actor.ranks {ranks} --rollout.engines {count}",
                        lambda both=changed: replace(config, actor=both[0], rollout=both[1]),
                    )
    if actor.layout == "thd" and actor.share != "prompts":
        yield "--actor.share prompts", change_actor(share="prompts")
    for kind in ("none", "core"):
        if actor.recompute not in ("none", kind):
            yield f"--actor.recompute {kind}", change_actor(recompute=kind)
    for times in (2, 4, 16, 64):
        tokens = actor.micro_batch_tokens * times
        yield f"--actor.micro-batch-tokens {tokens}", change_actor(micro_batch_tokens=tokens)
    for name in ("tp", "pp", "cp"):
        if (size := getattr(actor, name)) % 2 == 0:
            yield f"--actor.{name} {size // 2}", change_actor(**{name: size // 2})
    if rollout.tp % 2 == 0:
        changes = {"tp": rollout.tp // 2, "engines": rollout.engines * 2}
        yield f"--rollout.tp {changes['tp']} --rollout.engines {changes['engines']}", change_rollout(**changes)
    yield f"--rollout.max-num-seqs {rollout.max_num_seqs * 2}", change_rollout(max_num_seqs=rollout.max_num_seqs * 2)
    cache = rollout.kv_cache_mb or get_platform(config.platform).rollout_kv_cache_mb
    yield f"--rollout.kv-cache-mb {cache * 2}", change_rollout(kv_cache_mb=cache * 2)


def describe_forecast(config: TrainingConfig, models: Models, name: str) -> str:
    """Write a forecast of a step, and the three changes that help most.

    Args:
        name: of ``MACHINES``.

    Raises:
        ValueError: no such machine, or the run is of a kind that is not forecast.
    """
    if name not in MACHINES:
        raise ValueError(f"plan: --forecast names {name!r}, expected one of {', '.join(MACHINES)}")
    if not isinstance(config, RunConfig) or models["actor"].vision:
        raise ValueError("plan: --forecast knows steps of RL with text models alone; leave it out")
    machine = MACHINES[name]
    found = forecast_step(config, models, machine)
    phases = ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in found.phases.items())
    lines = [
        f"A step on {name}: {found.step:.3g} s, where all samples are longest; in turn, s: {phases}",
        f"{found.tokens:,.0f} tokens sampled a second; the update at {found.mfu:.1%} of the trainers' peak",
    ]
    if found.level:
        lines.append(f"From --rollout.staleness {found.level} on engines keep up with the trainers")
    else:
        lines.append("Engines do not keep up with the trainers at any staleness")
    for change in list_changes(config, models, machine)[:3]:
        saved = found.step - change.forecast.step
        lines.append(f"  {change.options}: {change.forecast.step:.3g} s a step, {saved / found.step:.0%} less")
    return "\n".join(
        [*lines, "Forecast by a roofline, from figures of data sheets and shares of them that were measured."]
    )
