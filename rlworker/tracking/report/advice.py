"""Advice on a run whose curves are bad: rules over its metrics, which docs/metrics.md lists."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from rlworker.tracking.report.record import RunRecord

_STEPS = 10
"""Number of first and of last steps that a rule looks at."""
_MOST_TRUNCATED = 0.3
_MOST_ZERO_VARIANCE = 0.8
_MOST_FAILED = 0.1
"""Largest healthy shares: of samples, of prompt groups and of episodes."""
_RISE = 3
"""Factor by which the difference of rollout and trainer may grow."""
_NEAR_LIMIT = 0.1
"""Share of its limit below which a difference is no trouble, however much it grew."""
_COLLAPSE = 0.1
"""Share of the first entropy at which a policy that still fails no longer explores."""
_LEARNED = 0.9
"""Share of a passing reward at which entropy may be low."""
_FALL = 0.1
"""Share of the best held-out score that two validations in a row may lack."""


@dataclass(frozen=True)
class Rule:
    """A rule of advice.

    Attributes:
        name: what is wrong. when: the condition, in words. advice: what to do.
        metrics: metrics of the curve that shows it; a run needs only one of them.
        find: returns what a run shows if the condition holds, else an empty text.
    """

    name: str
    when: str
    advice: str
    metrics: tuple[str, ...]
    find: Callable[[RunRecord], str]


@dataclass(frozen=True)
class Advice:
    """A rule that holds of a run: its ``name``, what was ``seen``, what to ``do``, and the ``metrics`` that show it."""

    name: str
    seen: str
    do: str
    metrics: tuple[str, ...]


def advise(run: RunRecord) -> list[Advice]:
    """List advice on a run, in the order of the rules."""
    found = [(rule, rule.find(run)) for rule in RULES]
    return [Advice(rule.name, seen, rule.advice, rule.metrics) for rule, seen in found if seen]


def _read(run: RunRecord, metric: str) -> list[float]:
    """Read the finite numbers of a metric over the steps."""
    return [line[metric] for line in run.steps if math.isfinite(line.get(metric, math.nan))]


def _find_rising_difference(run: RunRecord) -> str:
    means, limits = _read(run, "logprob_diff_mean"), _read(run, "logprob_diff_limit")
    if len(means) < 2 * _STEPS or not limits:
        return ""
    first, last = median(means[:_STEPS]), median(means[-_STEPS:])
    if last <= _RISE * first or last <= _NEAR_LIMIT * limits[-1]:
        return ""
    return f"{first:.1e} in the first {_STEPS} steps, {last:.1e} in the last; a run ends at {limits[-1]:.1e}"


def _find_truncation(run: RunRecord) -> str:
    return _find_large_share(run, "truncated", _MOST_TRUNCATED, "samples are cut at the length limit")


def _find_zero_variance(run: RunRecord) -> str:
    return _find_large_share(run, "zero_variance_share", _MOST_ZERO_VARIANCE, "groups have one reward throughout")


def _find_large_share(run: RunRecord, metric: str, most: float, what: str) -> str:
    shares = _read(run, metric)[-_STEPS:]
    share = fmean(shares) if shares else 0.0
    return f"{100 * share:.0f} % of the last {len(shares)} steps' {what}" if share > most else ""


def _find_entropy_collapse(run: RunRecord) -> str:
    entropies, rewards = _read(run, "entropy"), _read(run, "reward")
    if len(entropies) < 2 * _STEPS or not rewards:
        return ""
    first, last, reward = median(entropies[:_STEPS]), median(entropies[-_STEPS:]), fmean(rewards[-_STEPS:])
    passing = run.list_settings().get("environment.pass_reward", 1.0)
    if last >= _COLLAPSE * first or reward >= _LEARNED * passing:
        return ""
    return f"from {first:.2g} to {last:.2g} nats, while the reward is {reward:.2g}"


def _find_falling_score(run: RunRecord) -> str:
    for name, (_, kind) in run.scores.items():
        sign = -1 if kind == "loss" else 1
        scores = [(line[name], line["step"]) for line in run.lines if math.isfinite(line.get(name, math.nan))]
        if len(scores) < 3:
            continue
        best, step = max(scores, key=lambda pair: sign * pair[0])
        lacking = [sign * (best - score) for score, _ in scores[-2:]]
        if step < scores[-2][1] and min(lacking) > _FALL * abs(best):
            return f"{name} was {best:.3g} after step {step}, and is {scores[-1][0]:.3g}"
    return ""


def _find_failures(run: RunRecord) -> str:
    lines = run.steps[-_STEPS:]
    episodes = sum(line.get("samples", 0) for line in lines)
    failed = sum(line.get("episode_failures", 0) for line in lines)
    if not episodes or failed <= _MOST_FAILED * episodes:
        return ""
    return f"{failed:.0f} of {episodes:.0f} in the last {len(lines)} steps"


RULES = (
    Rule(
        "The difference of rollout and trainer rises",
        f"its median over the last {_STEPS} steps is above {_RISE} times that over the first {_STEPS}, and above "
        f"{100 * _NEAR_LIMIT:.0f} % of its limit",
        "Run rlworker check on the newest checkpoint and these sizes; lower --actor.optimizer.lr if it finds nothing.",
        ("logprob_diff_mean", "logprob_diff_max"),
        _find_rising_difference,
    ),
    Rule(
        "Answers are cut off",
        f"`truncated` is above {100 * _MOST_TRUNCATED:.0f} % in the last {_STEPS} steps",
        "Raise --rollout.max-new-tokens, set --algorithm.overlong-buffer, or ask for shorter answers.",
        ("truncated",),
        _find_truncation,
    ),
    Rule(
        "Most groups teach nothing",
        f"`zero_variance_share` is above {100 * _MOST_ZERO_VARIANCE:.0f} % in the last {_STEPS} steps",
        "Take easier or harder prompts, raise --samples-per-prompt, or set --algorithm.dynamic-sampling.",
        ("zero_variance_share",),
        _find_zero_variance,
    ),
    Rule(
        "Entropy collapses",
        f"its median over the last {_STEPS} steps is below {100 * _COLLAPSE:.0f} % of that over the first {_STEPS}, "
        f"and the reward below {100 * _LEARNED:.0f} % of `--environment.pass-reward`",
        "Lower --actor.optimizer.lr, raise --algorithm.clip-high, or set --algorithm.entropy-coef.",
        ("entropy",),
        _find_entropy_collapse,
    ),
    Rule(
        "A held-out score falls",
        f"the last two validations lack more than {100 * _FALL:.0f} % of the best",
        "Take the best checkpoint; lower --actor.optimizer.lr, set --algorithm.kl-coef, or add rows.",
        ("heldout", "heldout_loss"),
        _find_falling_score,
    ),
    Rule(
        "Episodes fail",
        f"more than {100 * _MOST_FAILED:.0f} % of the last {_STEPS} steps' samples",
        "Read environment.log in the run folder; docs/metrics.md says what to do for each kind.",
        ("episode_failures",),
        _find_failures,
    ),
)
