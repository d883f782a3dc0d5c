"""Questions of environments to served models: judges and classifiers.

A run that serves no model imports nothing of what reads, starts and asks one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.config.served import ServedModel
    from engines.models.hub import FindModel
    from rlworker.cluster.placement import DeviceSlot
    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.config.run import RunConfig
    from rlworker.rollouts.questions import Questions
    from rlworker.rollouts.scoring.group import ScoringGroup
    from rlworker.rollouts.scoring.questions import LendFn


def check_served(config: RunConfig, find: FindModel, is_whole: bool = True) -> dict[str, ServedModel]:
    """Read and check the served models of a run, as ``read_served``; none where the settings name none."""
    if not config.models:
        return {}
    group, _ = _import_served()
    return group.read_served(config, find, is_whole)


def start_groups(
    served: Mapping[str, ServedModel],
    config: RunConfig,
    start: Callable[[ScoringGroup], ScoringGroup],
    list_ranks: Callable[[], Sequence[DeviceSlot]] | None = None,
) -> dict[str, ScoringGroup]:
    """Start the engines of served models, by name; those with devices of their own begin to load.

    Args:
        start: registers a group with the run. list_ranks: as of ``Rollouts``.
    """
    if not served:
        return {}
    group, _ = _import_served()
    groups = {name: start(group.ScoringGroup(model, config, list_ranks)) for name, model in served.items()}
    return groups if list_ranks else {name: engines.begin() for name, engines in groups.items()}


def make_questions(served: Mapping[str, Rollouts], runs_ahead: bool, lend: LendFn | None) -> Questions:
    """Make what asks served models the questions of a run's episodes, as ``QuestionQueue``."""
    _, questions = _import_served()
    return questions.QuestionQueue(served, runs_ahead, lend)


def _import_served():
    from rlworker.rollouts.scoring import group, questions

    return group, questions
