"""RL post-training of language and vision-language models: everything that a recipe needs.

    from rlworker import Row, RunConfig, launch, parse_config

    def reward(text: str, row: Row) -> float:
        return float(text.strip() == row.answer)

    launch(parse_config(RunConfig(model="FOLDER", run_dir="runs/mine")), reward)

- ``launch``, ``launch_supervised``: from settings to a trained model; ``Trainer``, ``SftTrainer``: step by step.
- ``RunConfig``, ``SftConfig`` and their sections: the settings; ``parse_config`` reads them from the command line.
- ``Row``, ``TrainBatch``: what rewards and advantages are given.
- ``Episode``, ``Policy``, ``answer_calls``: to write an environment; ``Environment`` is its type. It may catch
  ``ToolFailure``, ``EpisodeLimit`` and ``NoVerdict``.
- ``combine_parts``, ``Verdict``: rewards by models, which ``ServedModelConfig`` names.
- ``Scorer``, ``batch_reward``, ``exact_match``, ``one_turn``: reward functions, and the one-turn environment of one.
- ``advantages``, ``losses``: modules of plain functions to choose from and to write beside.
- ``keeping_workers``: processes that go on from run to run, for a sweep.

A name is imported when it is asked for, so that settings are checked before torch takes seconds. The modules behind
these names may move; the names stay.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import engines
import hardware

# ruff: noqa: F401  the names under TYPE_CHECKING are for editors and for checkers of types
if TYPE_CHECKING:
    from engines.batch.batch import TrainBatch
    from engines.config import LoraConfig, MegatronConfig, OptimizerConfig, ServedModelConfig, VllmConfig
    from rlworker.algorithms import advantages, losses
    from rlworker.base.errors import RunError
    from rlworker.cluster.worker_pool import keeping_workers
    from rlworker.config.algorithm import AlgorithmConfig, DistillConfig
    from rlworker.config.command_line import parse_config
    from rlworker.config.run import RunConfig
    from rlworker.config.sections import (
        CheckpointConfig,
        CriticConfig,
        CurriculumConfig,
        DataConfig,
        EnvironmentConfig,
        LimitsConfig,
        PlacementConfig,
        RecoveryConfig,
    )
    from rlworker.config.sft import SftConfig
    from rlworker.config.validation import ValidationConfig
    from rlworker.data.rows import Row
    from rlworker.environments import (
        Environment,
        Episode,
        EpisodeLimit,
        NoVerdict,
        Policy,
        Scorer,
        ToolFailure,
        Verdict,
        batch_reward,
        exact_match,
        one_turn,
    )
    from rlworker.environments.parts import combine_parts
    from rlworker.environments.tools.calls import answer_calls
    from rlworker.tracking.tracker import Tracker
    from rlworker.trainers.launch import launch, launch_supervised
    from rlworker.trainers.rl import Trainer
    from rlworker.trainers.sft import SftTrainer

_HOMES = {
    "engines.batch.batch": ("TrainBatch",),
    "engines.config": ("LoraConfig", "MegatronConfig", "OptimizerConfig", "ServedModelConfig", "VllmConfig"),
    "rlworker.cluster.worker_pool": ("keeping_workers",),
    "rlworker.config.algorithm": ("AlgorithmConfig", "DistillConfig"),
    "rlworker.config.command_line": ("parse_config",),
    "rlworker.config.run": ("RunConfig",),
    "rlworker.config.sections": (
        "CheckpointConfig",
        "CriticConfig",
        "CurriculumConfig",
        "DataConfig",
        "EnvironmentConfig",
        "LimitsConfig",
        "PlacementConfig",
        "RecoveryConfig",
    ),
    "rlworker.config.sft": ("SftConfig",),
    "rlworker.config.validation": ("ValidationConfig",),
    "rlworker.data.rows": ("Row",),
    "rlworker.environments": (
        "Environment",
        "Episode",
        "EpisodeLimit",
        "NoVerdict",
        "Policy",
        "Scorer",
        "ToolFailure",
        "Verdict",
        "batch_reward",
        "exact_match",
        "one_turn",
    ),
    "rlworker.environments.parts": ("combine_parts",),
    "rlworker.environments.tools.calls": ("answer_calls",),
    "rlworker.base.errors": ("RunError",),
    "rlworker.tracking.tracker": ("Tracker",),
    "rlworker.trainers.launch": ("launch", "launch_supervised"),
    "rlworker.trainers.rl": ("Trainer",),
    "rlworker.trainers.sft": ("SftTrainer",),
}
_PLACES = {name: f"{home}:{name}" for home, names in _HOMES.items() for name in names}
_PLACES |= {name: f"rlworker.algorithms.{name}" for name in ("advantages", "losses")}
__all__ = [*_PLACES]  # pyright: ignore[reportUnsupportedDunderAll]  of the table above

for _package in (engines, hardware):
    if Path(_package.__file__ or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"rlworker: the package {_package.__name__!r} resolves to {_package.__file__}, which belongs to another "
            "project; uninstall that distribution or put this one first on the path"
        )


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return resolve_name(_PLACES[name])
    raise AttributeError(f"module 'rlworker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
