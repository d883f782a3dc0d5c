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
    from rlworker.config.run import RunConfig
    from rlworker.rollouts.scoring.group import ScoringGroup


def check_served(config: RunConfig, find: FindModel, is_whole: bool = True) -> dict[str, ServedModel]:
    """Read and check the served models of a run, as ``read_served``; none where the settings name none."""
    return _import_group().read_served(config, find, is_whole) if config.models else {}


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
    make_group = _import_group().ScoringGroup
    groups = {name: start(make_group(model, config, list_ranks)) for name, model in served.items()}
    return groups if list_ranks else {name: group.begin() for name, group in groups.items()}


def _import_group():
    from rlworker.rollouts.scoring import group

    return group
