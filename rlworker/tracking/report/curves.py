"""The curves of a page: which metrics a plot shows, what a healthy run looks like, and the numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rlworker.tracking.report.record import RunRecord

PHASES = ("time_rollout", "time_greedy", "time_logprobs", "time_values", "time_update", "time_sync", "time_canary")
"""Metrics of the phases of a step, in the order of the phases."""
MOST_LINES = 1100
"""Most lines of metrics.jsonl that are drawn one by one; a longer run is drawn with two points for each stretch of
lines."""
_FEWEST_LINES = 200
"""Least number of lines that are drawn of each run in a comparison of many."""


@dataclass(frozen=True)
class Curve:
    """A plot.

    Attributes:
        title: title with the unit. lines: metric -> label. good: what a good curve looks like.
        scale: scale of the vertical axis. band: whether the area between the first two lines is filled.
        limits: metric of a limit -> metric that it limits; it is drawn dashed, in the same color.
    """

    title: str
    lines: dict[str, str]
    good: str
    scale: Literal["linear", "log"] = "linear"
    band: bool = False
    limits: dict[str, str] = field(default_factory=dict)


_OTHER_METRIC = "Good: as the loss, the advantage or the environment that writes it says."
_CURVES = (
    Curve(
        "Loss (nats per token)",
        {"train_loss": "training", "heldout_loss": "held-out rows"},
        "Good: both fall. The model overfits where held-out rows rise again.",
    ),
    Curve(
        "Reward",
        {"reward": "sampled, training prompts", "heldout": "greedy, held-out prompts"},
        "Good: rises over tens of steps, and held-out prompts follow training prompts.",
    ),
    Curve(
        "Reward spread (standard deviation within a prompt)",
        {"reward_std": "mean over prompts"},
        "Good: well above 0. At 0 no answer of a prompt is better than another, and a group teaches nothing.",
    ),
    Curve(
        "Shares of a step that teach little",
        {
            "zero_variance_share": "zero-variance groups",
            "truncated": "truncated samples",
            "rejected": "rejected tokens",
        },
        "Good: zero-variance groups well below 1, truncated samples and rejected tokens near 0.",
    ),
    Curve(
        "Rollout against trainer: |difference of logprobs|",
        {
            "logprob_diff_mean": "mean of a step",
            "logprob_diff_max": "largest token",
            "logprob_diff_limit": "limit of the mean",
            "logprob_diff_max_limit": "limit of the largest",
        },
        "Good: flat, and both far below their limits. A jump means other weights or masks in the rollout.",
        "log",
        limits={"logprob_diff_limit": "logprob_diff_mean", "logprob_diff_max_limit": "logprob_diff_max"},
    ),
    Curve(
        "KL divergence (nats per token)",
        {"kl": "to the reference", "policy_kl": "of the rollout's policy to the trained one"},
        "Good: to the reference it grows slowly from 0; of the rollout's policy it stays below 0.05.",
    ),
    Curve(
        "Entropy (nats per token)",
        {"entropy": "entropy"},
        "Good: falls slowly. Near 0 with a low reward the policy no longer explores.",
    ),
    Curve(
        "Clip fraction (share of tokens)",
        {"clip_fraction": "policy", "value_clip_fraction": "critic"},
        "Good: below 0.2. Above it lower the learning rate or the number of mini-batches.",
    ),
    Curve(
        "Largest ratio of a token's probabilities, trained to old",
        {"ratio_max": "largest ratio"},
        "Good: below 10. A rise means that the updates of one rollout go too far.",
    ),
    Curve(
        "Importance factors",
        {"correction": "mean factor", "top_mass": "probability of the likeliest tokens"},
        "Good: a mean factor near 1, and a probability above 0.9.",
    ),
    Curve(
        "Gradient norm before clipping",
        {"grad_norm": "gradient norm", "critic_grad_norm": "critic's"},
        "Good: steady. Lower the learning rate where it spikes.",
    ),
    Curve(
        "Load of an expert (its tokens, divided by the mean of its layer's experts)",
        {
            "expert_load_max": "largest",
            "expert_load_min": "smallest",
            "critic_expert_load_max": "critic's largest",
            "critic_expert_load_min": "critic's smallest",
        },
        "Good: flat. A largest that rises means that the router sends ever more tokens to a few experts.",
    ),
    Curve(
        "Losses of the routers of experts (means over layers and tokens, without their coefficients)",
        {
            "router_aux_loss": "auxiliary",
            "router_z_loss": "z",
            "critic_router_aux_loss": "critic's auxiliary",
            "critic_router_z_loss": "critic's z",
        },
        "Good: the auxiliary loss near the number of experts that a token chooses, which equal loads give.",
    ),
    Curve(
        "Learning rate",
        {"lr": "learning rate", "critic_lr": "critic's"},
        "Good: as the schedule says: a rise in warm-up, then constant or a decay.",
    ),
    Curve(
        "Completion length (tokens)",
        {
            "completion_tokens_p10": "10 % are shorter",
            "completion_tokens_p90": "90 % are shorter",
            "completion_tokens_p50": "median",
            "completion_tokens": "mean",
            "completion_tokens_max": "longest",
        },
        "Good: steady, and most far below the limit. A drift to either end means that the reward pays for length.",
        band=True,
    ),
    Curve(
        "Penalty on the reward",
        {"penalty": "mean of a token"},
        "Good: small beside the reward.",
    ),
    Curve(
        "Critic's loss",
        {"value_loss": "value loss"},
        "Good: falls.",
    ),
    Curve(
        "Critic: share of the returns' variance that it explains",
        {"explained_variance": "explained variance"},
        "Good: rises from 0 towards 1. Below 0 the critic does harm.",
    ),
    Curve(
        "Tokens a second",
        {"tokens_per_second": "tokens a second"},
        "Good: steady. Look at the seconds by phase where it falls.",
    ),
    Curve(
        "FLOP/s of the update, all ranks",
        {"flops_per_second": "model FLOP/s"},
        "Good: steady, and with large micro-batches a third or more of the devices' peak.",
    ),
    Curve(
        "Largest memory of a process (GB)",
        {"memory_gb": "training", "rollout_memory_gb": "rollout"},
        "Good: flat after the first steps, below the device's memory. A steady rise is a leak.",
    ),
    Curve(
        "Age of tokens (updates)",
        {"token_age_mean": "mean of a step", "token_age_max": "oldest token"},
        "Good: a mean well below --rollout.staleness.",
    ),
    Curve(
        "Engines without anything to sample (seconds of a step)",
        {"engine_idle_seconds": "mean"},
        "Good: near 0. Else the engines wait for the trainer.",
    ),
    Curve(
        "Samples alive at an update",
        {"samples_at_update": "samples"},
        "Good: above 0. At 0 rollouts had ended before the update.",
    ),
    Curve(
        "An episode",
        {"turns": "turns", "forks": "forks", "tool_calls": "tool calls", "tool_failures": "failed tool calls"},
        "Good: fewer turns than --environment.turns, tool calls as the task needs, hardly a failed one.",
    ),
    Curve(
        "Episodes that failed",
        {"episode_failures": "training", "heldout_failures": "held-out"},
        "Good: 0. The terminal and environment.log say why one failed.",
    ),
    Curve(
        "Prompts left out (share of all)",
        {
            "curriculum/too_easy": "pass rate too high",
            "curriculum/too_hard": "pass rate too low",
            "curriculum/seen": "drawn at least once",
        },
        "Good: those too hard become fewer and those too easy more, and enough are left between.",
    ),
    Curve(
        "Buckets of difficulty that are open",
        {"curriculum/open_buckets": "buckets"},
        "Good: rises. Lower --curriculum.advance-at where it stands still.",
    ),
)
_AT_REST: dict[str, float] = {
    "turns": 1,
    "forks": 0,
    "tool_calls": 0,
    "tool_failures": 0,
    "clip_fraction": 0,
    "ratio_max": 1,
    "rejected": 0,
    "episode_failures": 0,
    "heldout_failures": 0,
}
"""Metric -> resting value. A metric that keeps its resting value in all steps is not drawn."""
_NOT_DRAWN = {"step", "version", "groups", "zero_variance_groups", "samples", "loss", "value_mean", "restarts"}
_NOT_DRAWN |= {"empty_steps", "epochs", "observed_tokens", "prompt_sharing", "approximate_rules"}
_BEGINNINGS_NOT_DRAWN = ("time_", "skipped_", "episode_", "heldout", "curriculum/", "logprob_diff_images_")
"""Metrics without a curve, and beginnings of their names; any other metric has a curve of its own."""
_PARTS = (
    ("share", "Shares of a step's prompts", "Good: as the weights say."),
    ("pass_rate", "Pass rates of a step's prompts", "Good: each rises, and none stays at 0 or 1."),
)
"""Last word, title and remark of metrics of each source and bucket: ``curriculum/SOURCE/share``."""


def choose_curves(runs: Sequence[RunRecord]) -> tuple[list[Curve], dict[str, float]]:
    """Choose the curves for which some run has numbers.

    Returns:
        the curves, each with only the lines that have numbers; and the metrics that are left out because they kept
            their resting value.
    """
    names, lines = {name for run in runs for name in run.metrics}, [line for run in runs for line in run.lines]
    moved = {name for name, rest in _AT_REST.items() if any(line.get(name, rest) != rest for line in lines)}
    at_rest = {name: rest for name, rest in _AT_REST.items() if name in names and name not in moved}
    curves = []
    for curve in (*_CURVES, *_name_further(runs)):
        shown = {name: label for name, label in curve.lines.items() if name in names and name not in at_rest}
        if shown:
            is_whole = len(shown) == len(curve.lines)
            title = curve.title
            if not is_whole and len(shown) == 1:
                title = _add_label(title, next(iter(shown.values())))
            curves.append(replace(curve, title=title, lines=shown, band=curve.band and is_whole))
    return curves, at_rest


def _add_label(title: str, label: str) -> str:
    """Add the label of its only line to a plot's title, unless the title says it."""
    return title if label.lower() in title.lower() else f"{title}: {label}"


def _name_further(runs: Sequence[RunRecord]) -> Iterator[Curve]:
    """Name the curves of metrics by their names: of validation sets, of parts of the data, and of own losses."""
    drawn = {name for curve in _CURVES for name in curve.lines} | _NOT_DRAWN
    names = [name for name in dict.fromkeys(name for run in runs for name in run.metrics) if name not in drawn]
    scores = {name: score for run in runs for name, score in run.scores.items() if name in names}
    for one in dict.fromkeys(of_set for of_set, _ in scores.values()):
        lines = {name: kind for name, (of_set, kind) in scores.items() if of_set == one}
        yield Curve(f"Validation: {one or 'held-out rows'}", lines, "Good: rises with the reward; a loss falls.")
    for kind, title, good in _PARTS:
        ends = {name: name.split("/") for name in names if name.startswith("curriculum/")}
        yield Curve(title, {name: parts[1] for name, parts in ends.items() if parts[-1] == kind}, good)
    for name in names:
        if not name.startswith(_BEGINNINGS_NOT_DRAWN):
            yield Curve(name, {name: name}, _OTHER_METRIC)


def list_phases(steps: Sequence[dict]) -> list[str]:
    """List the phases that took at least a thousandth of the steps' time, summed over all ``steps``.

    Args:
        steps: lines of metrics.jsonl, with the seconds ``time_step`` and those of the phases, such as ``time_rollout``.

    Returns:
        their metrics, such as ``time_rollout``, in the order of ``PHASES``.
    """
    total = sum(line["time_step"] for line in steps)
    names = {name: sum(line.get(name, 0.0) for line in steps) for name in PHASES}
    return [name for name, seconds in names.items() if seconds and seconds >= total / 1000]


def make_plots(runs: Mapping[str, RunRecord], curves: Sequence[Curve]) -> dict:
    """Make the data of a page's plots.

    Of one run, each curve is a plot. Of several runs, each metric is a plot of its own that compares them.

    Args:
        runs: name of a run -> run. curves: the curves to plot, from ``choose_curves``.

    Returns:
        ``plots``: a list of curves as dicts, each with its vertical ``range`` or None. ``runs``: for each run its
            ``name``, ``axes`` (``step``, ``tokens`` and ``seconds`` -> positions), ``numbers`` (metric -> positions and
            values) and ``width``, lines per stretch.
    """
    plots: list[dict[str, Any]] = [asdict(curve) | {"stack": False} for curve in curves]
    most = MOST_LINES
    if len(runs) > 1:
        apart = [(plot, name, label) for plot in plots for name, label in plot["lines"].items()]
        plots = [plot | {"lines": {name: label}, "band": False} for plot, name, label in apart]
        for one, (plot, _, label) in zip(plots, apart, strict=True):
            one["title"] = _add_label(one["title"], label) if len(plot["lines"]) > 1 else one["title"]
        most = max(_FEWEST_LINES, 2 * MOST_LINES // len(runs))
    elif phases := list_phases(next(iter(runs.values())).steps):
        labels = {name: name.removeprefix("time_") for name in phases}
        good = "Good: rollout and update take nearly all of a step, and no phase grows."
        plots.append(asdict(Curve("Seconds of a step by phase", labels, good)) | {"stack": True})
    metrics = list(dict.fromkeys(name for plot in plots for name in plot["lines"]))
    numbers = [_collect_numbers(name, run, metrics, most) for name, run in runs.items()]
    for plot in plots:
        names = plot["lines"].keys()
        plot["range"] = _choose_range(
            [column for run in numbers for name, column in run["numbers"].items() if name in names]
        )
    return {"plots": plots, "runs": numbers}


def _choose_range(columns: Sequence[Sequence]) -> list[float] | None:
    """Choose the vertical range of a plot whose numbers are all one: from 0 to twice it.

    None leaves it to plotly, which would draw 1e-6 from -1 to 1.

    Args:
        columns: places and numbers of each line.
    """
    values = {value for _, numbers in columns for value in numbers}
    if len(values) != 1 or 0 in values:
        return None
    return sorted([0.0, 2.0 * values.pop()])


def _collect_numbers(run_name: str, run: RunRecord, metrics: Sequence[str], most: int) -> dict:
    """Collect the axes and numbers of a run. In a run of more than ``most`` lines a point stands for several: each
    stretch has two, its lowest and its highest number in the order in which they came."""
    count = len(run.lines)
    width = 1 if count <= most else 2 * math.ceil(count / most)
    stretches = [range(start, min(start + width, count)) for start in range(0, count, width)]
    ends = [end for stretch in stretches for end in dict.fromkeys((stretch[0], stretch[-1]))]
    axes = {name: [places[end] for end in ends] for name, places in run.measure_axes().items()}
    numbers = {name: found for name in metrics if (found := _thin(run.lines, name, stretches))}
    return {"name": run_name, "width": width, "axes": axes, "numbers": numbers}


def _thin(lines: list[dict], name: str, stretches: list[range]) -> list[list | None]:
    """Find the numbers of a metric, at most two of a stretch, and their places among the ends of all stretches: None
    where it has one at each."""
    column = [line.get(name) for line in lines]
    places, numbers, place = [], [], 0
    for stretch in stretches:
        values = [v for v in column[stretch.start : stretch.stop] if v is not None and math.isfinite(v)]
        if name.startswith("time_") and values:  # stacked: extremes of phases would add up to no step
            values = [sum(values) / len(values)] * 2
        elif len(values) > 2:
            values = [values[at] for at in sorted((values.index(min(values)), values.index(max(values))))]
        ends = min(2, len(stretch))
        places += range(place, place + len(values[:ends]))
        numbers += [value if isinstance(value, int) else float(f"{value:.5g}") for value in values[:ends]]
        place += ends
    return [None if len(places) == place else places, numbers] if numbers else []
