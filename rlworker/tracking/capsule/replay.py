"""``rlworker replay``: compute a kept step anew, and name the first place that differs by more than rounding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from engines.config import MegatronConfig
from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from engines.validation import check_types
from hardware.platforms import DEFAULT_PLATFORM, PlatformName, get_platform
from rlworker.base.findings import Finding
from rlworker.cluster.ray import running_ray
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.watch import naming_failures
from rlworker.cluster.workers import Role, TrainWorker
from rlworker.config.model_checks import check_trainable
from rlworker.tracking.capsule.compare import compare_schedules, compare_updates, compute_norm_limit, find_first
from rlworker.tracking.capsule.files import Capsule, Update, read_capsule
from rlworker.tracking.capsule.functions import find_function
from rlworker.tracking.capsule.record import recording


@dataclass(frozen=True)
class ReplayConfig:
    """Settings of ``rlworker replay``. Those that are left out are the capsule's."""

    capsule: Positional[str] = ""
    """Folder of the capsule, such as RUN/capsules/step_3."""
    model: str = ""
    """Folder or hf:ORG/NAME of the starting model; empty takes the path that the run had."""
    checkpoint: str = ""
    """Folder of the checkpoint before the step; empty takes the run's, beside the folder of its capsules."""
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine that the engine runs on."""
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    json: bool = False
    """Print JSON in place of the table."""

    def __post_init__(self):
        check_types("replay", self)


def make_default_config(folder: str) -> ReplayConfig:
    """Return the settings of a capsule."""
    capsule = read_capsule(folder)
    return ReplayConfig(folder, platform=capsule.platform, actor=capsule.config)  # pyright: ignore[reportArgumentType]  a name


def run_replay(config: ReplayConfig, tell: Callable[[str], None]) -> list[Finding]:
    """Start the training engine, compute the step anew, end the engine and return the findings.

    Args:
        tell: is called with a line of text at the start of each part.

    Raises:
        ValueError: the capsule, its model, its checkpoint or its loss is not there; nothing was started.
    """
    capsule = read_capsule(config.capsule)
    find_function(capsule.loss)
    model = ModelSpec.from_folder(find_model(config.model or capsule.model))
    check_trainable(model, config.actor, config.platform)
    checkpoint = find_checkpoint(config, capsule)
    roles = (Role("actor", model, config.actor, capsule.temperature),)
    tell("the engine starts")
    with (
        running_ray(config.actor.ranks, config.platform),
        StartingGroup("actor", config.platform, roles, capsule.seed) as starting,
        naming_failures("replay", starting.name_workers),
    ):
        group = starting.wait()["actor"]
        if checkpoint:
            group.call(TrainWorker.load, str(checkpoint / "actor"))
        return replay(capsule, group, tell)


def find_checkpoint(config: ReplayConfig, capsule: Capsule) -> Path | None:
    """Return the checkpoint at which a capsule begins; None where it begins at the starting model.

    Raises:
        ValueError: it is not there.
    """
    if not capsule.checkpoint:
        return None
    folder = Path(config.checkpoint or capsule.folder.parents[1] / capsule.checkpoint)
    if not (folder / "actor").is_dir():
        raise ValueError(
            f"capsule: step {capsule.step} begins at the checkpoint {str(folder)!r}, which is not there; name it by "
            "--checkpoint"
        )
    return folder


def replay(capsule: Capsule, group: WorkerGroup, tell: Callable[[str], None] = lambda line: None) -> list[Finding]:
    """Compute a capsule's optimizer steps anew on an engine with its weights, and compare them stage by stage.

    Args:
        group: the engine; it has taken the steps afterwards. tell: as for ``run_replay``.
    """
    loss, platform = find_function(capsule.loss), group.platform

    def find(check: str, where: str, passed: bool, text: str) -> Finding:
        return Finding(check, where, "ok" if passed else "FAILED", text, get_platform(platform.name).evidence)

    findings: list[Finding] = []
    is_alike = capsule.config == group.role.config and capsule.platform == platform.name
    for number, kept in enumerate(capsule.updates, 1):
        tell(f"optimizer step {number} of {len(capsule.updates)}")
        with recording(group, capsule.config.dtype, kept.span) as made:
            group.train_step(kept.batch, loss, kept.denominator)
        now = made.updates[0]
        if number == 1 and capsule.config.dtype == group.role.config.dtype:  # digests are of weights in their type
            findings.append(find("weights", "before the step", *_compare_weights(capsule.weights, made.weights)))
        if is_alike and (text := compare_schedules(kept, now)):
            findings.append(find("schedule", f"optimizer step {number}", False, text))
        findings.append(find("step", f"optimizer step {number}", *_compare(kept, now)))
    return findings


def _compare_weights(before: dict[str, int], now: dict[str, int]) -> tuple[bool, str]:
    """Compare digests of weights: whether all are equal, and a text."""
    unlike = [name for name, digest in before.items() if now.get(name) != digest]
    text = f"{len(unlike)} of {len(before)} tensors are not the run's, the first {unlike[0]}" if unlike else ""
    return not unlike, text or f"{len(before)} tensors are alike"


def _compare(kept: Update, now: Update) -> tuple[bool, str]:
    """Compare an optimizer step with the capsule's: whether rounding explains all differences, and a text."""
    stages = compare_updates(kept, now)
    other = find_first(stages, kept.rows, bits=True)
    if other and (first := find_first(stages, kept.rows)):
        text = f"differs first in {first.describe(kept)}"
        return False, text if first == other else f"{text}; other bits first in {other.name_place()}"
    norm, before = now.metrics["grad_norm"], kept.metrics["grad_norm"]
    apart, limit = abs(norm - before) / before if before else abs(norm), compute_norm_limit(kept, now)
    told = f"gradient norm {norm:.6g}, apart by {apart:.1e}, limit {limit:.1e}"
    if not apart <= limit:
        return False, f"all {len(stages)} stages are alike; {told}; look at the backward pass"
    if not other:
        return (
            True,
            f"bit for bit in {len(stages)} stages; {told if apart else f'loss and gradient norm {norm:.6g} too'}",
        )
    worst = max(stages, key=lambda stage: stage.share)
    return True, (
        f"alike within rounding; other bits first in {other.name_place()}; at most "
        f"{worst.share:.2f} of the limit, in {worst.name}; {told}"
    )
