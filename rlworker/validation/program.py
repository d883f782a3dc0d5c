"""Evaluation without training: rollout engines answer the held-out rows of a recipe."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path

from engines.config import SamplingConfig
from engines.models.hub import PREFIX, find_model
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from hardware.vllm_versions import check_vllm, list_version_warnings
from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER, log_start
from rlworker.cluster.placement import ResourceRequest, check_room
from rlworker.cluster.ray import check_ray, running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.watch import limiting_stalls, naming_failures
from rlworker.config.changes import read_differences
from rlworker.config.model_checks import check_folder, check_rollout, list_model_warnings
from rlworker.config.run import RunConfig
from rlworker.data.rows import check_rows, check_vocabulary, read_rows
from rlworker.environments.codec import Codec
from rlworker.environments.processes.pool import ENVIRONMENT_LOG, ProcessPool, pickle_environment
from rlworker.environments.processes.trial import try_rewards
from rlworker.environments.reward import Environment, Scorer, make_environment
from rlworker.rollouts.manager import RolloutManager
from rlworker.rollouts.metrics import describe_trajectory
from rlworker.rollouts.running import make_codec, running_loop, set_limits
from rlworker.rollouts.scoring import check_served, start_groups
from rlworker.tracking.log import format_table
from rlworker.tracking.provenance import collect_provenance
from rlworker.validation.validate import Validation, validate

_OWN = ("data.train", "data.heldout", "data.heldout_sets", "environment.workers")
"""Settings that may differ between an evaluation and the checkpoint's run."""
TABLE, SAMPLES = "validation.json", "samples.jsonl"
"""Files of an evaluation: the table with settings and provenance; and every episode."""


def find_weights(name: str) -> str:
    """Return the folder of weights that ``--model`` names: for a checkpoint, its ``hf`` folder.

    Raises:
        ValueError: ``name`` is the folder of a run, which has several checkpoints.
    """
    if (Path(name) / "hf" / "config.json").is_file():
        return str(Path(name) / "hf")
    if checkpoints := sorted(Path(name).glob("checkpoints/step_*/hf"), key=lambda path: path.stat().st_mtime):
        raise ValueError(
            f"model: {name!r} is the folder of a run; name one of its checkpoints, such as {checkpoints[-1].parent}"
        )
    return name


def list_differences(config: RunConfig) -> list[str]:
    """List the settings of prompts, sampling and environments that differ from those of the checkpoint's run."""
    run = Path(config.model, "../../..").resolve()  # of run/checkpoints/step_N/hf
    if Path(config.model).name != "hf" or not (run / "config.json").is_file():
        return []
    found, sampling = read_differences(run, config), {f"rollout.{field.name}" for field in fields(SamplingConfig)}
    return [
        f"{key} {before!r} -> {now!r}"
        for key, (before, now) in found.items()
        if key in sampling or (key.startswith(("data.", "environment.")) and key not in _OWN)
    ]


class Evaluation:
    """An evaluation of ``config.model`` on the held-out rows, without training.

    Raises:
        ValueError: the settings, the model or the rows cannot be used; nothing was started.
    """

    def __init__(self, config: RunConfig, environment: Environment | Scorer):
        check_ray()
        check_vllm(config.ignore_versions)
        # In turns, so that another evaluation of the same model samples the same.
        config = replace(config, model=find_weights(config.model), rollout=replace(config.rollout, staleness=0))
        self.config, self.environment = config, make_environment(environment)
        pickle_environment(self.environment)
        config.choose_metric()  # refused here where it cannot be
        if not config.data.heldouts:
            raise ValueError("evaluate: there are no held-out rows; set --data.heldout or --data.heldout-sets")
        if config.run_dir in ("", "."):
            raise ValueError("evaluate: no folder for the results; set --run-dir, such as --run-dir runs/mine")
        if differences := list_differences(config):
            LOGGER.warning(f"evaluate: settings differ from those of the checkpoint's run: {', '.join(differences)}")
        self.model = ModelSpec.from_folder(find_model(config.model))
        check_folder(self.model)
        check_rollout(self.model, config.platform, config.rollout)
        warnings = list_version_warnings(config.ignore_versions)
        for warning in warnings + list_model_warnings(self.model, config.platform, config.rollout):
            LOGGER.warning(warning)
        self.served = check_served(config, find_model)
        for path in config.data.heldouts.values():
            check_rows(path, config.data)
        try_rewards(self.environment, config, list(config.data.heldouts.values()))
        self.codec = make_codec(config, self.model)
        parts = self.codec.tokenizer, config.data, self.codec.image_reader
        self.rows = {name: read_rows(path, *parts).rows for name, path in config.data.heldouts.items()}
        rows = [row for own in self.rows.values() for row in own]
        check_vocabulary([row.prompt for row in rows], [row.prompt_ids for row in rows], self.model.vocab)
        log_start(f"rows are read: {len(rows)} held out, in {len(self.rows)} sets")

    def run(self) -> dict[str, float]:
        """Start the engines, validate once, write the results into ``run_dir/evaluations`` and return the metrics.

        Raises:
            RunError: a worker failed, or the folder cannot be written to, which leaves the table on the terminal.
        """
        folder = _make_folder(Path(self.config.run_dir).absolute() / "evaluations", name_evaluation(self.config.model))
        with ExitStack() as running:
            validation = self._validate(running, folder)
        LOGGER.info(format_table(validation.table))  # before the files, which a full disk refuses
        try:
            self._write(folder, validation)
        except OSError as error:
            raise RunError(
                f"evaluate: {str(folder)!r} cannot be written to: {error}; keep the table above, free disk space, and "
                "evaluate again for the samples"
            ) from error
        LOGGER.info(f"evaluation: {folder}")
        return validation.metrics

    def _validate(self, running: ExitStack, folder: Path) -> Validation:
        config = self.config
        os.environ.update(get_platform(config.platform).get_driver_env())
        running.enter_context(limiting_stalls(config.recovery.stall_timeout_s))
        engines = {"rollout": config.rollout} | config.models
        running.enter_context(running_ray(sum(each.devices for each in engines.values()), config.platform))
        sizes = [(f"{name} engines", config.platform, each.engines, each.tp) for name, each in engines.items()]
        check_room([ResourceRequest(*each) for each in sizes])
        rollouts = running.enter_context(Rollouts(*sizes[0][1:])).start(self.model, config.rollout)
        served = start_groups(self.served, config, running.enter_context)
        limits = set_limits(config), config.environment.workers, folder / ENVIRONMENT_LOG
        pool = running.enter_context(ProcessPool(self.environment, self.codec, *limits))

        def name_workers():
            groups = [rollouts, *served.values(), pool]
            return {name: worker for group in groups for name, worker in group.name_workers().items()}

        with naming_failures("phase start_rollouts", name_workers):
            for group in (rollouts, *served.values()):
                group.wait()
        log_start(f"rollout engines are up: {len(rollouts.workers)}")
        loop = running.enter_context(running_loop(config, self.environment, pool, rollouts, self.codec, served))
        parts = self.codec, [], rollouts, loop, lambda *_: nullcontext(), LOGGER.warning
        with naming_failures("phase evaluate", name_workers):
            return validate(RolloutManager(config, *parts), self.rows)

    def _write(self, folder: Path, validation: Validation) -> None:
        provenance, settings = collect_provenance(self.config.platform), asdict(self.config)
        result = {"model": self.model.folder, "table": validation.table, "metrics": validation.metrics}
        result |= {"provenance": asdict(provenance), "settings": settings}
        (folder / TABLE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        with open(folder / SAMPLES, "w", encoding="utf-8", errors="backslashreplace") as file:
            for line in _describe(validation, self.codec):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def name_evaluation(model: str) -> str:
    """Return the folder name of an evaluation: ``step_40`` for a checkpoint, else the name of the model's folder."""
    name = model.removeprefix(PREFIX).partition("@")[0] if model.startswith(PREFIX) else model
    path = Path(os.path.abspath(name))  # "." has no name of its own
    return path.parent.name if path.name == "hf" else path.name


def _make_folder(parent: Path, name: str) -> Path:
    """Make a folder of that name, or where it is taken the first of ``NAME.1``, ``NAME.2``, ... that is free."""
    for number in count():
        folder = parent / (f"{name}.{number}" if number else name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def _describe(validation: Validation, codec: Codec) -> Sequence[dict]:
    """Describe every episode: by set and row, the greedy one first."""
    lines = []
    for each in validation.sets:
        for row, greedy in enumerate(each.greedy):
            sampled = each.sampled[row] if each.sampled else []
            for place, trajectory in enumerate([*greedy, *sampled]):
                line = {"set": each.name, "row": row, "drawn": "sampled" if place else "greedy"}
                lines.append(line | {"voted": trajectory.answer} | describe_trajectory(trajectory, codec))
    return lines
