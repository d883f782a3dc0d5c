"""Toys: models and tasks made on the spot, warmed up until some answers are right, then trained from the reward."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from annotated_types import Ge

from engines.batch.shard import Outputs
from engines.interfaces import LossFn
from hardware.platform import describe
from hardware.platforms import get_platform
from rlworker import DataConfig, RunConfig, TrainBatch, Trainer, advantages, exact_match, launch, parse_config
from rlworker.algorithms.distillation import reverse_kl
from rlworker.algorithms.objective import configure_advantage
from rlworker.base.terminal import log_start
from rlworker.cluster.ray import running_ray
from rlworker.tracking.log import read_metrics
from rlworker.tracking.report.page import format_report
from rlworker.tracking.run_folder import RunFolder
from rlworker.tracking.trackers import check_trackers
from rlworker.trainers.stop import Stop, graceful_stop


@dataclass(frozen=True)
class ToyConfig(RunConfig):
    """Settings of a toy: a RunConfig with a warm-up before it and a control beside it."""

    warm_up_steps: Annotated[int, Ge(1)] = 1000
    """Most supervised steps."""
    shuffle_rewards: bool = False
    """Control: hand out the same rewards at random. The model must then not get better."""
    smoke: bool = False
    """Two small steps after a few of warm-up, to see that everything runs."""


Config = TypeVar("Config", bound=ToyConfig)


@dataclass(frozen=True)
class Toy:
    """A task for a tiny model to learn, made on the spot.

    Attributes:
        make_data: writes train.jsonl and heldout.jsonl into a folder. make_model: saves a model of a seed in a folder.
        warm_up: ``warm_up(config, output)`` trains the model on right answers and saves it in the folder ``output``.
        learn_from: the reward function, or the environment.
        measure: ``measure(trainer)`` finds further numbers of the trained model for the summary.
        make_trainer: makes the trainer, by the arguments of ``Trainer``.
    """

    make_data: Callable[[Path], Path]
    make_model: Callable[[Path, int], Path]
    warm_up: Callable[[Any, str], None]
    learn_from: Callable = exact_match
    measure: Callable[[Trainer], dict] = lambda trainer: {}
    make_trainer: Callable[..., Trainer] = Trainer


def shuffle_advantage(advantage: advantages.AdvantageFn) -> advantages.AdvantageFn:
    """Make the control's advantage: the same numbers, from the whole rewards of the episodes in random order."""

    def shuffled_advantage(batch: TrainBatch, **settings: float):
        episode, rewards = batch.number_episodes(), batch.require_column("rewards")  # [B]
        if batch.turn_rewards is not None:
            rewards = rewards + batch.sum_per_sequence(batch.turn_rewards)
        whole = torch.zeros(batch.num_episodes).index_add(0, episode, rewards)
        version = int(batch.require_column("versions").max())
        order = torch.from_numpy(np.random.default_rng(version).permutation(len(whole)))
        is_last = torch.ones(len(batch), dtype=torch.bool)
        is_last[:-1] = episode[1:] != episode[:-1]
        shuffled_rewards = torch.zeros(len(batch)).masked_scatter(is_last, whole[order])
        return advantage(replace(batch, rewards=shuffled_rewards, turn_rewards=None), **settings)

    return shuffled_advantage


def shuffle_teacher(loss: LossFn) -> LossFn:
    """Make the control's loss by a teacher whose likeliest ids are exchanged at random, anew at each place.

    Distributions of other places would still tell how certain a teacher is, by which a policy gets better.
    """

    def shuffled_loss(outputs: Outputs, batch: TrainBatch):
        top = batch.require_column("ref_top_logprobs")  # [N, k + 1], others last
        places = np.random.default_rng(len(top)).random((len(top), top.shape[1] - 1)).argsort(1)
        shuffled = torch.cat([top[:, :-1].gather(1, torch.from_numpy(places).to(top.device)), top[:, -1:]], 1)
        return loss(outputs, replace(batch, ref_top_logprobs=shuffled))

    return shuffled_loss


def make_control(config: RunConfig) -> dict[str, Any]:
    """Make the arguments of ``Trainer`` by which a run is its own control: it learns from shuffled rewards, or from a
    shuffled teacher."""
    if config.distill.top_k:
        return {"loss": shuffle_teacher(reverse_kl)}
    if config.algorithm.distills:
        sys.exit("error: shuffle_rewards: distill learns from no reward; set --distill.top-k, or leave it out")
    return {"advantage": shuffle_advantage(configure_advantage(config))}


def summarise(config: ToyConfig, wall_seconds: float, warm_up_seconds: float) -> dict:
    """Sum the run up in a few numbers."""
    lines = read_metrics(Path(config.run_dir))
    heldout = [line["heldout"] for line in lines if "heldout" in line]
    steps = [line for line in lines if line["step"]]
    # Some steps may have no token of the newest weights, or no group to learn from.
    compared = [line for line in steps if "logprob_diff_mean" in line]
    actor = config.actor
    return {
        "heldout_before": heldout[0],
        "heldout_after": heldout[-1],
        "steps": len(steps),
        "wall_seconds": wall_seconds,
        "warm_up_seconds": warm_up_seconds,
        "logprob_diff_mean": max((line["logprob_diff_mean"] for line in compared), default=None),
        "logprob_diff_max": max((line["logprob_diff_max"] for line in compared), default=None),
        "seconds_per_step": float(np.median([line["time_step"] for line in steps])),
        "shuffle_rewards": config.shuffle_rewards,
        "seed": config.seed,
        "platform": describe(get_platform(config.platform)),
    } | {name: getattr(actor, name) for name in ("layout", "tp", "pp", "cp", "ep", "dp")}


def find_warm_model(config: ToyConfig) -> Path:
    """Return the folder of the warmed-up model, which GRPO starts from."""
    return Path(config.run_dir) / f"model_warm_seed{config.seed}"


def name_data(config: ToyConfig) -> DataConfig:
    """Name the files of a toy's rows."""
    folder = Path(config.run_dir, "data")
    return replace(config.data, **{name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")})


def prepare(config: Config, toy: Toy) -> tuple[Config, RunFolder]:
    """Claim the run folder, make the data and the model, which take no engine, and check everything against them."""
    user_keys = [
        key for key, value in (("model", config.model), ("data", config.data.train or config.data.heldout)) if value
    ]
    if user_keys:
        raise ValueError(f"demo: --{user_keys[0]} is made on the spot; for your own use recipes.grpo")
    folder = Path(config.run_dir)
    config = replace(config, data=name_data(config))
    check_trackers(config.trackers)
    run = RunFolder(config.run_dir)
    run.claim(replace(config, model=str(find_warm_model(config))))
    toy.make_data(folder / "data")
    model = toy.make_model(folder / f"model_init_seed{config.seed}", config.seed)
    config = replace(config, model=str(model))
    config.check_models()
    return config, run


def train_toy(config: ToyConfig, run: RunFolder, toy: Toy, stop: Stop) -> None:
    """Train the toy of ``config``, which ``prepare`` returned with its folder, and sum it up."""
    start = time.perf_counter()
    folder = Path(config.run_dir)
    warm_model = find_warm_model(config)
    control = {"advantage": shuffle_advantage(configure_advantage(config))} if config.shuffle_rewards else {}
    with running_ray(config.num_workers, config.platform):  # once for both parts
        log_start("Ray is up")
        if not warm_model.exists():
            toy.warm_up(config, str(warm_model))
            log_start("the model is warmed up")
        warm_up_seconds = time.perf_counter() - start
        parts: dict[str, Any] = dict(folder=run, stop=stop) | control
        with toy.make_trainer(replace(config, model=str(warm_model)), toy.learn_from, **parts) as trainer:
            trainer.fit()
            further = {} if stop.signal else toy.measure(trainer)
    if stop.signal:
        return  # there is more to come
    summary = summarise(config, time.perf_counter() - start, warm_up_seconds) | further
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    print(format_report(folder))


def run_toy(default: ToyConfig, description: str | None, toy: Toy) -> None:
    """Run the demo as ``python -m`` does: settings from the command line, everything checked, the run."""
    config = parse_config(default, description)
    if config.evaluate:
        if not Path(config.run_dir, "data").exists():
            toy.make_data(Path(config.run_dir, "data"))
        launch(replace(config, data=name_data(config)), toy.learn_from)
        return
    if config.smoke:
        config = replace(config, critic=replace(config.critic, warmup_steps=min(1, config.critic.warmup_steps)))
        config = replace(config, warm_up_steps=5, steps=2, prompts_per_step=8, samples_per_prompt=4, eval_every=0)
        config = replace(config, validation=replace(config.validation, patience=0))
    with graceful_stop() as stop:
        try:
            config, folder = prepare(config, toy)
        except ValueError as error:
            sys.exit(f"error: {error}")
        train_toy(config, folder, toy, stop)
