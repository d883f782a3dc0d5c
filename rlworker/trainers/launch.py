"""From settings to a trained model: the functions that a recipe's ``__main__`` calls."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import rlworker
from hardware.platforms import get_platform
from hardware.vllm_versions import check_vllm
from rlworker.base.terminal import LOGGER, log_start
from rlworker.cluster.placement import ResourceRequest, check_room
from rlworker.cluster.ray import check_ray, pausing_collection, running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.run import RunConfig
from rlworker.config.sizes import count_batch_bytes
from rlworker.data.rows import check_rows, read_ends
from rlworker.environments.processes.pool import ENVIRONMENT_LOG
from rlworker.environments.processes.trial import try_rewards
from rlworker.environments.reward import Environment, Scorer, make_environment
from rlworker.rollouts.scoring import check_served
from rlworker.tracking.log import read_metrics
from rlworker.tracking.run_folder import RunFolder, Score
from rlworker.tracking.trackers import check_trackers
from rlworker.trainers.stop import SIGNALS, graceful_stop

if TYPE_CHECKING:
    from engines.models.spec import ModelSpec
    from rlworker.config.memory import Served
    from rlworker.config.sft import SftConfig


def launch(config: RunConfig, environment: Environment | Scorer, **parts: Any) -> dict[str, float]:
    """Check the settings, start everything and train to the last step.

    A mistake in the settings or a worker that fails ends the program with a message. SIGTERM or Ctrl-C ends it after
    the current step, which is saved; a second signal ends it at once.

    Ray takes seconds to start, and so do the imports of torch and transformers, so they run side by side; checks that
    need neither come first. vLLM's imports take longest, and begin as soon as Ray is up.

    Args:
        config: settings of the run.
        environment: a reward function, or ``async def environment(policy, row) -> Episode``.
        parts: further arguments of ``Trainer``: ``advantage``, ``loss``, ``aggregation`` and ``trackers``.

    Returns:
        the metrics of the last step, or with ``config.evaluate`` those of the evaluation.
    """
    if config.evaluate:
        return launch_evaluation(config, environment)
    with graceful_stop() as stop, ExitStack() as running:
        try:
            environment = make_environment(environment)
            folder = check_run(config)
            running.callback(folder.release)
            if ended := explain_end(config, folder):
                LOGGER.info(ended)
                return read_last_metrics(folder)
            try_rewards(environment, config, list_sources(config), folder.path / ENVIRONMENT_LOG)
            log_start("settings, folders and fields of rows are checked")
            if config.shares_base:
                log_start("the critic shares the actor's weights, beside adapters and a head of its own")
            # The main thread gets the signals of the other, too; it may hold them back.
            block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS)
            with ThreadPoolExecutor(1, initializer=block) as beside:
                building = beside.submit(_build_trainer, config, environment, parts | {"folder": folder, "stop": stop})
                # Ray's processes end with the thread that starts them, which is therefore this one.
                running.enter_context(running_ray(config.num_workers, config.platform, count_batch_bytes(config)))
                check_room([ResourceRequest(who, config.platform, *sizes) for who, *sizes in config.worker_groups])
                log_start("Ray is up")
                rollouts = None
                if not config.placement.colocate:  # else they wait for the ranks whose devices they share
                    sizes = config.rollout.engines, config.rollout.tp
                    rollouts = running.enter_context(Rollouts(config.platform, *sizes))
                trainer = building.result()
            trainer.starting_rollouts = rollouts
        except ValueError as error:
            sys.exit(f"error: {error}")
        with trainer:
            return trainer.fit()


def launch_evaluation(config: RunConfig, environment: Environment | Scorer) -> dict[str, float]:
    """Check the settings, start the rollout engines, evaluate the model on the held-out rows and return the metrics."""
    with graceful_stop():
        try:
            with pausing_collection():
                from rlworker.validation.program import Evaluation

                evaluation = Evaluation(config, environment)
        except ValueError as error:
            sys.exit(f"error: {error}")
        return evaluation.run()


def launch_supervised(config: SftConfig, **parts: Any) -> dict[str, float]:
    """Check the settings, start the engine and train on rows with answers to the last step. It is ``launch`` for SFT.

    Args:
        config: settings of the run.
        parts: further arguments of ``SftTrainer``: ``trackers``.

    Returns:
        the metrics of the last step.
    """
    with graceful_stop() as stop, ExitStack() as running:
        try:
            folder = check_run(config)
            running.callback(folder.release)
            if ended := explain_end(config, folder):
                LOGGER.info(ended)
                return read_last_metrics(folder)
            with pausing_collection():
                trainer = rlworker.SftTrainer(config, folder=folder, stop=stop, **parts)
        except ValueError as error:
            sys.exit(f"error: {error}")
        with trainer:
            return trainer.fit()


def check_run(config: RunConfig | SftConfig) -> RunFolder:
    """Check the folders of models and the fields of every row, which is quick, then claim the run folder and return it.

    Raises:
        ValueError: a folder, a model, a row or a setting cannot be used.
    """
    check_ray()
    if isinstance(config, RunConfig):
        check_vllm(config.ignore_versions)
    folder = RunFolder(config.run_dir)
    folder.check(config)
    models = config.check_models(folder.inputs.find_model)
    read_ends(models["actor"].folder, models["actor"].vocab)
    served = check_served(config, folder.inputs.find_model) if isinstance(config, RunConfig) else {}
    _warn_of_memory(config, models, {name: each.spec for name, each in served.items()})
    check_trackers(config.trackers)
    config.choose_metric()  # refused here where it cannot be
    check = check_rows
    if not isinstance(config, RunConfig):
        from rlworker.data.conversations import check_examples as check
    sources = list_sources(config)
    for path in (*sources, *config.data.heldouts.values()):
        check(path, config.data)
    folder.inputs.hold(config.data, sources=sources)
    folder.claim(config)
    return folder


def explain_end(config: RunConfig | SftConfig, folder: RunFolder) -> str:
    """Explain why a run that is to go on has nothing left to do; empty where it has, or is a new one."""
    if not config.resume or not (done := folder.count_steps()):
        return ""
    if done >= config.steps:
        reason = f"has all of its {config.steps} steps; raise --steps to go on"
    else:
        score = Score(config.choose_metric(), +1 if isinstance(config, RunConfig) else -1)
        lines = [line for line in read_metrics(folder.path) if line["step"] <= done]
        if not score.has_stalled(lines, config.validation.patience):
            return ""
        reason = f"ended after step {done} of {config.steps}: {score.describe_stall(config.validation.patience)}"
    return f"run: {folder.path} {reason}. Nothing was started; choose another --run-dir for a new run"


def read_last_metrics(folder: RunFolder) -> dict[str, float]:
    """Read the metrics of the last step of a run."""
    lines = read_metrics(folder.path)
    return {name: value for name, value in lines[-1].items() if name != "step"} if lines else {}


def list_sources(config: RunConfig | SftConfig) -> list[str]:
    """List the sources of the rows that a run trains on."""
    if isinstance(config, RunConfig):
        return list(config.curriculum.weigh_sources(config.data.train))
    return [config.data.train]


def _warn_of_memory(config: RunConfig | SftConfig, models: dict[str, ModelSpec], served: Served) -> None:
    """Warn where a run on this machine alone is about to take more than its memory."""
    if get_platform(config.platform).visible_devices or os.environ.get("RAY_ADDRESS"):
        return  # devices have memory of their own, and a cluster has more machines
    from rlworker.config.memory import judge_machine

    text, fits = judge_machine(config, models, served)
    if not fits:
        LOGGER.warning(f"memory: {text[0].lower()}{text[1:]}")


def _build_trainer(config: RunConfig, environment: Environment | Scorer, parts: dict):
    with pausing_collection():
        return rlworker.Trainer(config, environment, **parts)
