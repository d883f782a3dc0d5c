"""``rlworker plan --run-shapes``: chosen ranks of a run in shapes, beside their plan."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING

from engines.megatron.memory.activations import MicroBatch
from engines.megatron.memory.estimate import RankMemory, compute_rank_memory
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from hardware.shapes.platform import make_shaped
from rlworker.base.errors import RunError
from rlworker.checks.shapes.case import RankCase, RankCount
from rlworker.config.memory import GB, count_row_slots, count_share, plan_micro_batch
from rlworker.config.run import RunConfig

if TYPE_CHECKING:
    from rlworker.config.sft import SftConfig

    Config = RunConfig | SftConfig

_KINDS = ("parameters", "gradients", "optimizer", "activations", "total")
_SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families with a vision tower that was run in shapes."""
_EVIDENCE = (
    "Shape-executed: the engine's own code on a device that is not there. Counted are the peak of an optimizer step "
    "and the static bytes after it; micro-batches are full, of samples of the longest, and none shares its prompt."
)


def choose_ranks(config: "Config") -> list[int]:
    """Choose the first rank of the first, a middle and the last pipeline stage, and the last rank of all."""
    actor = config.actor
    stage_ranks = actor.ranks // actor.pp
    firsts = {stage * stage_ranks for stage in (0, actor.pp // 2, actor.pp - 1)}
    return sorted(firsts | {actor.ranks - 1})


def list_cases(config: "Config", model: ModelSpec, ranks: Sequence[int]) -> list[RankCase]:
    """List the ranks to run; with experts on several ranks each runs with balanced and with the worst routes.

    Raises:
        ValueError: a rank is none of the run's, or the model's tower was not run in shapes.
    """
    actor, micro = config.actor, plan_micro_batch(config)
    if wrong := [rank for rank in ranks if not 0 <= rank < actor.ranks]:
        raise ValueError(f"plan: --run-shapes names rank {wrong[0]}, expected 0 to {actor.ranks - 1}")
    if model.vision and (family := model.family.model_type) not in _SEEING:
        raise ValueError(
            f"plan: --run-shapes runs the towers of {', '.join(_SEEING)}, and {model.folder!r} is a {family}; leave "
            "it out"
        )
    each = max(1, micro.slots // count_row_slots(config))
    micro_batches = min(actor.pp, -(-count_share(config) // each))
    routes = ("balanced", "worst") if model.experts and actor.ep > 1 else ("balanced",)
    sizes = config.longest, micro.sequences, micro_batches
    return [RankCase(model, actor, config.platform, rank, *sizes, way) for rank in ranks for way in routes]


def run_cases(cases: Sequence[RankCase]) -> list[RankCount]:
    """Run each rank in a process of its own, one after another.

    Raises:
        ValueError: what the engine refuses, as on a real start.
        RunError: a rank failed otherwise; it is named.
    """
    counts = []
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                counts.append(process.submit(_run, case).result())
            except ValueError:
                raise
            except (BrokenProcessPool, Exception) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                raise RunError(
                    f"plan: rank {case.rank} of {case.config.ranks}, stage {case.stage}, failed in shapes: {reason}"
                ) from error
    return counts


def _run(case: RankCase) -> RankCount:
    import warnings

    warnings.filterwarnings("ignore")  # of Megatron, which lacks optional packages
    platform = make_shaped(get_platform(case.platform))
    device = platform.init_process(0)
    from rlworker.checks.shapes.rank import run_rank  # and with it Megatron

    return run_rank(case, platform, device)


def describe_counts(
    cases: Sequence[RankCase], counts: Sequence[RankCount], config: "Config", memory_gb: float
) -> tuple[str, bool]:
    """Write counted beside planned bytes, and return whether all of them fit.

    Args:
        memory_gb: memory of each device; 0 sets no limit.
    """
    lines = [f"{'in shapes, GB':34s}{'seconds':>8s}" + "".join(f"{kind:>12s}" for kind in _KINDS)]
    large = []
    for case, count in zip(cases, counts, strict=True):
        name = f"rank {case.rank}, stage {case.stage}" + (f", {case.routes} routes" if case.model.experts else "")
        memory = plan_rank(case, config)
        counted = {**count.held, "activations": count.activations, "total": count.total}
        planned = {kind: getattr(memory, kind) for kind in _KINDS}
        figures = "".join(f"{counted[kind] / GB:12.3f}" for kind in _KINDS)
        lines.append(f"{name:34s}{sum(count.seconds.values()):8.0f}{figures}")
        lines.append(f"{'  planned':42s}" + "".join(f"{planned[kind] / GB:12.3f}" for kind in _KINDS))
        lines.append(f"  {count.flops / 1e12:.3f} TFLOP, recomputation included")
        lines += _describe_calls(case, count)
        differing = [kind for kind in count.held if count.held[kind] != planned[kind]]
        if differing:
            lines.append(f"  The plan differs in {', '.join(differing)}, which should be equal to the byte.")
        if memory_gb and count.total > memory_gb * GB:
            large.append(f"rank {case.rank} needs {count.total / GB:.1f} GB")
    if config.actor.dtype == "float32":
        lines.append(
            "Attention in float32 has no fused kernel in shapes, so that its activations are counted too large."
        )
    if large:
        ways = ["raise --actor.tp, --actor.pp or, with experts, --actor.ep", "lower --actor.micro-batch-tokens"]
        ways += ["take --actor.recompute full"] if config.actor.recompute != "full" else []
        lines.append(f"Does not fit into {memory_gb:g} GB in shapes: {'; '.join(large)}; {', or '.join(ways)}")
    exported = max(counts, key=lambda count: count.exported)
    if exported.exported:
        lines.append(
            f"A sync exports {exported.tensors} tensors, {exported.exported / GB:.3f} GB, in {exported.buckets} buckets"
        )
    return "\n".join([*lines, _EVIDENCE]), not large


def _describe_calls(case: RankCase, count: RankCount) -> list[str]:
    """Write a step's collectives and messages: those of a group in a line, with its link."""
    node = get_platform(case.platform).node
    groups: dict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)
    for call in count.calls:
        if (size := len(call.ranks)) > 1:
            is_inside = node is None or len({rank // node.devices for rank in call.ranks}) == 1
            group = groups[call.group, size, "within a node" if is_inside else "between nodes"]
            group[call.name] += 1
            group[""] += call.nbytes
    return [
        f"  {name} of {size} ranks, {link}: {group.pop('') / GB:.3f} GB, "
        + ", ".join(f"{call} x {calls}" for call, calls in sorted(group.items()))
        for (name, size, link), group in sorted(groups.items())
    ]


def plan_rank(case: RankCase, config: "Config") -> RankMemory:
    """Plan the memory of the actor on a rank, by the routes of the case."""
    place, kernels = case.rank % case.stage_ranks, get_platform(case.platform).kernel_memory
    return compute_rank_memory(case.model, case.config, case.stage, place, plan_case(case, config), kernels)


def plan_case(case: RankCase, config: "Config") -> MicroBatch:
    """Plan the largest micro-batch of a run, with the routes of the case."""
    micro, experts = plan_micro_batch(config), case.model.experts
    if case.routes == "worst" and experts:
        ep = case.config.ep  # a token chooses each expert once, so at most those that a rank has
        micro = replace(micro, routed=ep * min(experts.chosen, experts.count // ep) / experts.chosen)
    return micro
