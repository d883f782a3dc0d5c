"""``rlworker check --self-test``: test the check itself with faults that it must find."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from engines.models.families import list_families
from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from engines.probes.faults import ADAPTER_FAULTS, FAULTS, REAL_FAULTS, Fault, collect_faults, list_real_faults
from hardware.platforms import get_platform
from rlworker.base.findings import Finding
from rlworker.checks import check
from rlworker.checks.check import check_all, send_weights
from rlworker.checks.config import CheckConfig
from rlworker.checks.context import CheckedEngines, start_engines
from rlworker.checks.shapes.family import check_family
from rlworker.checks.tiny.models import Tiny, make_tiny_family, make_tiny_model
from rlworker.checks.trainer import list_kinds, list_platform_limits
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts

_ALL: Tiny = "qwen2"
"""The tiny model of the settings that stands for all of them."""


def check_machine(config: CheckConfig, tell: Callable[[str], None]) -> list[Finding]:
    """Prove masks, layouts, logprobs and weight sync on this machine, or by a self-test that planted faults are found;
    of a model type without a file, tell what it lacks.

    Args:
        tell: prints a line of progress.
    """
    if config.family and config.family not in list_families():
        return check_family(config.family)
    with TemporaryDirectory(prefix="rlworker-check-") as folder:
        if config.self_test:
            return run_self_test(replace(config, self_test=False), folder, tell)
        head_dims = get_platform(config.platform).rollout_head_dims
        if config.family:
            model = make_tiny_family(folder, config.family, head_dims)
        else:
            model = find_model(config.model) or make_tiny_model(folder, config.tiny, head_dims)
        return check.run_check(replace(config, model=model, tiny="qwen2", family=""), tell)


def run_self_test(config: CheckConfig, folder: str, tell: Callable[[str], None]) -> list[Finding]:
    """Run the checks without a fault, then plant each fault of ``engines.probes.faults`` and run the check for it.

    Args:
        config: settings of the check; with a model, only faults that show on it are planted, with ``tiny`` those of
            that one, and with adapters only those of adapters. The parallel sizes, layout, sharing and router replay
            are not used: faults show at ``Fault.spread``, in packs that share prompts if the platform has packs, on
            rollout engines of one device, and under replay where one needs it.
        folder: folder for tiny models, if no model is given.
        tell: is called with a line of text after every fault.

    Returns:
        a finding for each fault, and the failures of the check without a fault.

    Raises:
        ValueError: the platform has no place for a fault; nothing was started.
    """
    findings: list[Finding] = []
    platform, adapted = get_platform(config.platform), config.actor.lora.rank
    collect_faults(platform)
    listed = ADAPTER_FAULTS if adapted else _list_faults(config.tiny)
    config = replace(config, rollout=replace(config.rollout, tp=1))
    with running_ray(2 + config.rollout.devices, config.platform):
        if config.model:
            listed = listed if adapted else list_real_faults(ModelSpec.from_folder(config.model))
            faults = {name: fault for name, fault in listed.items() if fault.can_show(platform)}
            findings += _test_model(config, Path(config.model).name, faults, tell)
            return [*findings, *list_platform_limits(platform)]
        shown = {name: fault for name, fault in listed.items() if fault.can_show(platform)}
        for kind in dict.fromkeys(fault.model for fault in shown.values()):
            model = make_tiny_model(f"{folder}/{kind}", cast(Tiny, kind))
            faults = {name: fault for name, fault in shown.items() if fault.model == kind}
            findings += _test_model(replace(config, model=model, tiny=_ALL), kind, faults, tell)
    return [*findings, *list_platform_limits(platform)]


def _list_faults(tiny: Tiny) -> dict[str, Fault]:
    """List the faults that show on a tiny model, or all.

    Raises:
        ValueError: none shows on it.
    """
    faults = {name: fault for name, fault in FAULTS.items() if tiny in (_ALL, fault.model)}
    if not faults:
        kinds = sorted({fault.model for fault in FAULTS.values()} - {_ALL})
        raise ValueError(
            f"check: no fault of --self-test is planted into a tiny {tiny}, expected one of {kinds}; change --tiny, or "
            "leave it out"
        )
    return faults


def _test_model(config: CheckConfig, kind: str, faults: dict[str, Fault], tell: Callable[[str], None]) -> list[Finding]:
    """Test the faults that show on one model, through rollout engines of its own; before them, the checks that must
    find them must find nothing."""
    findings: list[Finding] = []
    alike = REAL_FAULTS.keys() | ADAPTER_FAULTS.keys()  # which show on all models: other checks have been made of it
    one = replace(config.actor, ranks=1, tp=1, pp=1, cp=1, ep=1, etp=1)
    in_packs = "thd" in list_kinds(config.platform, one, ModelSpec.from_folder(config.model))
    layout, share = ("thd", "prompts") if in_packs else ("bshd", "auto")
    one, replays = replace(one, layout=layout, share=share), any(fault.replays for fault in faults.values())
    config = replace(config, actor=one, rollout=replace(config.rollout, replay_routes=replays))
    with ExitStack() as running:
        rollouts = running.enter_context(Rollouts(config.platform, config.rollout.engines, config.rollout.tp))
        rollouts.start(config.check_model(), config.rollout)
        version = 1
        for spread in sorted({fault.spread for fault in faults.values()}):
            here = f"{kind}, {spread}=2" if spread else f"{kind}, one rank"
            sizes = replace(one, **{"ranks": 2, spread: 2}) if spread else one
            with start_engines(replace(config, actor=sizes), tell, rollouts) as engines:
                needed = {fault.found_by for fault in faults.values()} if faults.keys() <= alike else ()
                found = check_all(engines, version, needed)
                failed = [finding for finding in found if finding.outcome == "FAILED"]
                tell(f"without a fault, {here}: {len(failed)} findings")
                findings += failed or [engines.trainer.make_finding("no fault", here, True, "nothing found")]
                for name, fault in faults.items():
                    if fault.spread == spread:
                        version += 3
                        tell(f"fault: {name}")
                        findings.append(_test_fault(engines, name, fault, version))
                        tell(f"{findings[-1].outcome:6s} {name}: {findings[-1].text}")
                version += 3
    return findings


def _test_fault(engines: CheckedEngines, name: str, fault: Fault, version: int) -> Finding:
    """Plant a fault, make the check that must find it, take the fault out again."""
    group = engines.actor if fault.where == "actor" else engines.rollouts
    engines = replace(engines, trainer=replace(engines.trainer, ends_early=True))
    group.run("engines.probes.faults:plant", name)
    try:
        findings = check_all(engines, version, (fault.found_by,))
    finally:
        group.run("engines.probes.faults:mend")
        send_weights(engines, version + 2)  # what the fault may have kept back
    failed = [finding for finding in findings if finding.outcome == "FAILED"]
    named = [finding for finding in failed if not finding.text.startswith("raised")]
    if named:
        text = f"{named[0].check}, {named[0].where}: {named[0].text}"
    else:
        text = "not found by the check that must: " + "; ".join(f"{f.where}: {f.text}" for f in findings)
    return engines.trainer.make_finding("fault", name, bool(named), text)
