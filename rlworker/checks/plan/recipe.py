"""``rlworker plan RECIPE``: batches, padding and memory of a run, computed before it starts."""

import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np

from engines.batch.beginnings import choose_sharing, group_prompts
from engines.batch.schedule import plan_schedule
from engines.config import MegatronConfig
from engines.megatron.memory.activations import count_copied_slots
from engines.megatron.memory.estimate import estimate_padding
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from rlworker.checks.plan.changes import describe_forecast
from rlworker.checks.plan.refusals import check_nodes, check_start
from rlworker.checks.shapes.run import choose_ranks, describe_counts, list_cases, run_cases
from rlworker.config.command_line import parse_config
from rlworker.config.memory import (
    GB,
    Need,
    Served,
    count_row_slots,
    count_share,
    judge_machine,
    list_needs,
)
from rlworker.config.run import RunConfig
from rlworker.config.sft import SftConfig

Config = RunConfig | SftConfig

_PARTS = ("parameters", "gradients", "optimizer", "activations", "host")


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        batch: label -> value, sizes of a step.
        needs: memory of the largest rank of each stage, and of a rollout engine.
        padding: share of the trainer's slots without a token.
        sees: whether the model takes images.
    """

    batch: dict[str, str]
    needs: list[Need]
    padding: float
    sees: bool


def plan_recipe(
    recipe: str, settings: list[str], memory_gb: float, ranks: list[int] | None = None, machine: str = ""
) -> tuple[str, bool]:
    """Plan a recipe, and return the plan as text and whether it fits into memory.

    Args:
        recipe: name of a module or path of a file, which has its settings in ``DEFAULT``.
        settings: options of the recipe's command line.
        memory_gb: memory of the device of each process; 0 takes that of a device of the platform's node, or on a
            platform without devices this machine's memory for all processes together.
        ranks: trainer ranks to run in shapes as well; none chooses some, None runs none.
        machine: name of the machine on which a step is forecast; empty forecasts none.

    Raises:
        RunError: a rank failed in shapes.
        ValueError: the recipe is missing, the start would refuse the settings by the models' config.json, the memory is
            no size, or no forecast is known.
    """
    if not memory_gb >= 0:  # NaN too
        raise ValueError(
            f"plan: --memory-gb is {memory_gb:g}, expected the GB of a device; leave it out to plan for the platform's "
            "own"
        )
    default = _import_default(recipe)
    config = parse_config(default, args=settings, prog=f"rlworker plan {recipe}")
    if not config.model:
        raise ValueError(f"plan: {recipe} names no model; set --model FOLDER, a folder with config.json")
    models, served = check_start(config)
    plan = make_plan(config, models, served)
    plan = replace(plan, batch=plan.batch | _describe_sharing(config, models["actor"]))
    node = get_platform(config.platform).node
    memory_gb = memory_gb or (node.device_gb if node else 0.0)
    text, fits = _judge(config, models, served, plan, memory_gb)
    text = f"{describe_plan(plan)}\n{text}"
    text += f"\n\n{describe_forecast(config, models, machine)}" if machine else ""
    if ranks is None:
        return text, fits
    cases = list_cases(config, models["actor"], ranks or choose_ranks(config))
    shapes, fits_in_shapes = describe_counts(cases, run_cases(cases), config, memory_gb)
    return f"{text}\n\n{shapes}", fits and fits_in_shapes


def _import_default(recipe: str) -> Config:
    """Import a recipe and return its settings."""
    path = Path(recipe)
    is_file = path.suffix == ".py"
    advice = "give a module such as recipes.grpo or the path of a recipe's file, such as ./own.py"
    if not (path.is_file() if is_file else all(part.isidentifier() for part in recipe.split("."))):
        raise ValueError(f"plan: {recipe!r} is {'no file' if is_file else 'no name of a module'}; {advice}")
    try:
        module = _import_file(path) if is_file else importlib.import_module(recipe)
    except (Exception, SystemExit) as error:  # a user's file may raise anything when it is imported
        lacks = f"{error.name}." if isinstance(error, ModuleNotFoundError) else "."
        if not is_file and f"{recipe}.".startswith(lacks):
            raise ValueError(f"plan: there is no module {recipe!r} ({error}); {advice}") from None
        place = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"plan: importing {recipe!r} failed: {reason}, at {place.filename}:{place.lineno}; correct it, and keep "
            'what starts a run under if __name__ == "__main__"'
        ) from None
    default = getattr(module, "DEFAULT", None)
    if not isinstance(default, Config):
        state = f"is a {type(default).__name__}" if hasattr(module, "DEFAULT") else "is not there"
        raise ValueError(
            f"plan: {recipe!r} must have its settings as DEFAULT, a RunConfig or SftConfig, but DEFAULT {state}; add "
            "a line such as DEFAULT = RunConfig()"
        )
    return default


def _import_file(path: Path) -> ModuleType:
    """Import the module in a file under a name of its own, with the file's folder on the path as in ``python FILE``."""
    name = f"recipe at {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not spec or not spec.loader:
        raise ImportError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for the types that its fields name
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _judge(
    config: Config, models: dict[str, ModelSpec], served: Served, plan: Plan, memory_gb: float
) -> tuple[str, bool]:
    if not memory_gb:
        return judge_machine(config, models, served)
    if not (large := list_misfits(plan, memory_gb)):
        return f"Every process fits into {memory_gb:g} GB", True
    text = "; ".join(f"{need.name} need {need.total / GB:.1f} GB" for need in large)
    text = f"Does not fit into {memory_gb:g} GB: {text}"
    if not all(need.is_rollout for need in large):
        settings = find_nearest(config, models, memory_gb)
        text += f". The trainers fit with {settings}" if settings else ". No trainer sizes that were tried fit"
    return text, False


def make_plan(config: Config, models: dict[str, ModelSpec], served: Served = MappingProxyType({})) -> Plan:
    """Plan a run.

    Args:
        models: role -> model, for each role of ``config.roles``; ``config.json`` alone suffices.
        served: as of ``list_needs``.
    """
    batch = _describe_rl_batch(config) if isinstance(config, RunConfig) else _describe_supervised_batch(config)
    batch |= _describe_cut(config)
    if experts := models["actor"].experts:
        parts = f" in {config.actor.etp} parts" if config.actor.etp > 1 else ""
        held = f"{experts.count // config.actor.ep} of {experts.count} on each rank{parts}"
        batch["experts"] = f"{held}; {experts.chosen} for each token"
    sees = models["actor"].vision is not None
    return Plan(batch, list_needs(config, models, served), estimate_padding(config.actor, config.longest), sees)


def _describe_rl_batch(config: RunConfig) -> dict[str, str]:
    minis, steps, longest = config.algorithm.mini_batches, config.steps, config.longest
    optimizer_steps = config.algorithm.optimizer_steps
    prompts, count, samples = config.prompts_per_step, config.samples_per_prompt, config.samples_per_step
    return {
        "a step": f"{prompts} prompts x {count} samples = {samples} samples",
        "a sample": f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens} = {longest} tokens at most",
        "a mini-batch": f"{samples // minis} samples, one optimizer step; {optimizer_steps} in a step",
        "the run": f"{steps} steps, {steps * optimizer_steps} optimizer steps, {steps * prompts:,} prompts, "
        f"{steps * samples:,} samples, {steps * samples * longest:,} tokens at most",
    }


def _describe_supervised_batch(config: SftConfig) -> dict[str, str]:
    rows, longest = config.rows_per_step, config.longest
    return {
        "a step": f"{rows} samples, one optimizer step",
        "a sample": f"{config.data.max_prompt_tokens} + {config.max_answer_tokens} = {longest} tokens at most",
        "the run": f"{config.steps} steps, {config.steps * rows:,} samples, "
        f"{config.steps * rows * longest:,} tokens at most",
    }


def _describe_cut(config: Config) -> dict[str, str]:
    """Describe how the samples of an optimizer step are spread over ranks and cut."""
    actor, share = config.actor, count_share(config)
    budget = actor.slots if actor.layout == "thd" and actor.slots else actor.micro_batch_tokens
    each = max(1, min(budget, actor.micro_batch_tokens) // count_row_slots(config))
    most = max(-(-share // each), min(actor.pp, share))
    sizes = f"tp {actor.tp} x pp {actor.pp} x cp {actor.cp} = {actor.ranks // actor.dp} ranks"
    return {
        "a replica": f"{sizes}; {share} samples of an optimizer step for each of {actor.dp}",
        "a micro-batch": f"{actor.micro_batch_tokens:,} slots at most, so {most} on a replica where all are longest",
    }


def _describe_sharing(config: Config, model: ModelSpec) -> dict[str, str]:
    """Describe an optimizer step of the longest samples with each prompt once; nothing where none is shared."""
    actor, platform = config.actor, get_platform(config.platform)
    if not isinstance(config, RunConfig) or choose_sharing(actor, platform) == "none":
        return {}
    samples, group = config.rows_per_mini_batch, config.samples_per_prompt
    copied = count_copied_slots(model, actor, platform.kernel_memory)
    prompts = group_prompts(np.arange(samples) // group, np.full(samples, config.data.max_prompt_tokens))
    prompts = replace(prompts, copied_slots=copied)
    lengths = [config.longest - 1] * samples
    most = platform.max_pack_sequences
    computed = plan_schedule(lengths, actor, model.hidden, actor.dp, most, beginnings=prompts).count_computed()
    text = f"{computed:,} tokens are computed of {sum(lengths):,}, {sum(lengths) / computed:.1f} times fewer"
    return {"prompts once": f"{text}, where all samples are longest"}


def list_misfits(plan: Plan, memory_gb: float) -> list[Need]:
    """List the processes that need more than ``memory_gb`` on their device."""
    return [need for need in plan.needs if need.total > memory_gb * GB]


def find_nearest(config: Config, models: dict[str, ModelSpec], memory_gb: float) -> str:
    """Find the options with which the trainers fit, with the fewest changes; empty if no tried setting fits."""
    actor = config.actor
    recompute = dict.fromkeys((actor.recompute, "full"))
    tokens = [actor.micro_batch_tokens // cut for cut in (1, 2, 4, 8)]
    longest = config.longest
    sizes = (1, 2, 4, 8, 16)
    spread = sizes if any(model.experts for model in models.values()) else (1,)
    candidates = []
    for kind, most, tp, pp, ep, dp in product(recompute, tokens, sizes, sizes, spread, dict.fromkeys((actor.dp, 1))):
        is_less = tp < actor.tp or pp < actor.pp or ep < actor.ep
        if is_less or (most < longest and most != actor.micro_batch_tokens):
            continue
        try:
            ranks = tp * pp * actor.cp * dp
            other = replace(actor, recompute=kind, micro_batch_tokens=most, tp=tp, pp=pp, ep=ep, ranks=ranks)
            for model in models.values():
                other.check_model(model)
            changed = replace(config, actor=other)  # other settings may refuse it, such as engines on the same devices
            check_nodes(changed)
        except ValueError:
            continue
        changes = _list_changes(actor, other)
        candidates.append(((len(changes), ranks, -most, tp * pp, ep, changes), changed))
    for (*_, changes), changed in sorted(candidates, key=lambda candidate: candidate[0]):
        needs = list_misfits(make_plan(changed, models), memory_gb)
        if all(need.is_rollout for need in needs):
            return " ".join(changes)
    return ""


def _list_changes(before: MegatronConfig, after: MegatronConfig) -> list[str]:
    names = ("ranks", "tp", "pp", "ep", "recompute", "micro_batch_tokens")
    pairs = [(name, getattr(after, name)) for name in names if getattr(after, name) != getattr(before, name)]
    return [f"--actor.{name.replace('_', '-')} {value}" for name, value in pairs]


def describe_plan(plan: Plan) -> str:
    """Write the plan as text."""
    width = max(len(label) for label in plan.batch)
    lines = [f"{label.ljust(width)}  {value}" for label, value in plan.batch.items()]
    lines.append(f"{'padding'.ljust(width)}  about {100 * plan.padding:.1f} % of the trainer's slots, at even lengths")
    lines += [
        "",
        f"{'GB':24s}" + "".join(f"{name:>12s}" for name in (*_PARTS, "total")),
    ]
    for need in plan.needs:
        for role, memory in need.roles.items():
            name = need.name if len(need.roles) == 1 else f"{need.name}: {role}"
            parts = (*(getattr(memory, part) for part in _PARTS), memory.total)
            lines.append(f"{name:24s}" + "".join(f"{part / GB:12.3f}" for part in parts))
        if len(need.roles) > 1:
            lines.append(f"{need.name:24s}{need.host / GB:{12 * len(_PARTS)}.3f}{need.total / GB:12.3f}")
    lines.append(
        "Parameters, gradients and optimizer are exact; activations are an estimate; a rollout engine's are its cache."
    )
    if any(need.host for need in plan.needs):
        lines.append(
            "What is on the host is no part of a total, but for the weights of a model that computes at the time."
        )
    if not all(need.count for need in plan.needs):
        lines.append(
            "Actor and rollout engines share devices in turn. A model that waits for its turn has its parameters and "
            "optimizer in the host's memory."
        )
    if plan.sees:
        lines.append("The vision tower is counted as if every token of a micro-batch were an image's.")
    return "\n".join(lines)
