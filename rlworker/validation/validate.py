"""Validation: run the episodes of every held-out set, and compute their metrics and tables by source."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlworker.base.errors import RunError
from rlworker.config.run import RunConfig
from rlworker.config.validation import list_sizes, name_set
from rlworker.data.formats import SOURCE
from rlworker.data.rows import Row
from rlworker.environments.record import is_pass
from rlworker.rollouts.manager import RolloutManager
from rlworker.rollouts.metrics import score_groups
from rlworker.rollouts.trajectory import TrajectoryGroup


@dataclass(frozen=True)
class ValidatedSet:
    """A held-out set with its episodes.

    Attributes:
        name: name of the set; empty for ``data.heldout``.
        greedy: ``[R]``, a group of one greedy episode for each row.
        sampled: ``[R]``, a group of ``validation.samples`` episodes for each row; empty where none are sampled.
    """

    name: str
    greedy: list[TrajectoryGroup]
    sampled: list[TrajectoryGroup]


@dataclass(frozen=True)
class Validation:
    """The result of a validation of every held-out set.

    Attributes:
        sets: the sets with their episodes.
        table: one dict for each set, followed by one for each source if the set has several: ``{"set": name, "source":
            name, "rows": R, "greedy": mean reward, "mean_at_n": ..., "pass_at_k": ..., "maj_at_k": ...}``. The source
            of a whole set is empty.
        metrics: metrics of whole sets, and the number of failed episodes.
    """

    sets: list[ValidatedSet]
    table: list[dict]
    metrics: dict[str, float]


def validate(manager: RolloutManager, rows: Mapping[str, list[Row]]) -> Validation:
    """Run the episodes of every held-out set: one greedy episode of each row, and ``validation.samples`` sampled
    episodes.

    Args:
        rows: name of a set -> its rows.
    """
    config, sets, failures = manager.config, [], {}
    settings = config.validation
    temperature = settings.temperature or config.rollout.temperature
    for place, (name, own) in enumerate(rows.items()):
        greedy = manager.draw_heldout(place, own, 1, 0.0)
        sampled = manager.draw_heldout(place, own, settings.samples, temperature) if settings.samples else []
        sets.append(ValidatedSet(name, greedy, sampled))
        failures |= score_groups([*greedy, *sampled], manager.codec).count_failures(name_set(name))
    table = [line for each in sets for line in _tabulate(each, config)]
    metrics = _list_metrics(table)
    if settings.metric and settings.metric not in metrics:
        raise RunError(
            f"validation: there is no metric {settings.metric!r}, since the environment finds no answers to vote on; "
            "pass one_turn(reward, answer=...) to launch or set Episode.answer, or take another --validation.metric"
        )
    return Validation(sets, table, metrics | failures)


def _tabulate(validated: ValidatedSet, config: RunConfig) -> Iterator[dict]:
    """Tabulate a set, and each of its sources where they are several."""
    sources = [str(group[0].row.source.get(SOURCE) or "(none)") for group in validated.greedy]
    names = sorted(set(sources))
    for source in ["", *names] if len(names) > 1 else [""]:
        rows = [row for row, own in enumerate(sources) if not source or own == source]
        line = {"set": validated.name, "source": source, "rows": len(rows)}
        line |= {"greedy": _average([validated.greedy[row] for row in rows])}
        yield line | (_estimate([validated.sampled[row] for row in rows], config) if validated.sampled else {})


def _list_metrics(table: Sequence[Mapping]) -> dict[str, float]:
    metrics = {}
    for line in (line for line in table if not line["source"]):
        name = name_set(line["set"])
        own = {key: value for key, value in line.items() if "_at_" in key}
        metrics |= {name: line["greedy"]} | {f"{name}_{key}": value for key, value in own.items()}
    return metrics


def _average(groups: Sequence[TrajectoryGroup]) -> float:
    """Average the rewards of some prompts' episodes."""
    rewards = [trajectory.reward for group in groups for trajectory in group]
    return sum(rewards) / len(rewards)


def _estimate(groups: Sequence[TrajectoryGroup], config: RunConfig) -> dict[str, float]:
    """Average mean@n and pass@k over prompts, and maj@k where the environment finds answers."""
    from rlworker.validation.estimates import estimate_majority, estimate_pass  # greedy answers alone need none

    samples = config.validation.samples
    rights = [[is_pass(one.reward, config.environment.pass_reward) for one in group] for group in groups]
    answers = [[one.answer.strip() for one in group] for group in groups]
    found, sizes = {f"mean_at_{samples}": _average(groups)}, list_sizes(samples)
    for size in sizes:
        found[f"pass_at_{size}"] = sum(estimate_pass(right, size) for right in rights) / len(groups)
    for size in sizes if any(map(any, answers)) else ():
        votes = [estimate_majority(*pair, size) for pair in zip(answers, rights, strict=True)]
        found[f"maj_at_{size}"] = sum(votes) / len(groups)
    return found
