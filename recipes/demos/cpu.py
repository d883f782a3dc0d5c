"""A language model learns to add on a laptop CPU, with nothing stubbed: Ray, Megatron-core, vLLM.

A tiny Qwen3 and its questions ("23+45=" -> "068") are made on the spot, warmed up on answers until it is right in
a third to a half of them, then trained by GRPO from the reward alone. Held-out questions are never trained on.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge

from engines.models.spec import ModelSpec
from hardware.platform import describe
from hardware.platforms import get_platform
from recipes.common.addition import make_data, make_model
from rlworker import (
    AlgorithmConfig,
    DataConfig,
    MegatronConfig,
    OptimizerConfig,
    RunConfig,
    SftConfig,
    TrainBatch,
    Trainer,
    VllmConfig,
    advantages,
    parse_config,
    rewards,
)
from rlworker.cluster.ray import running_ray
from rlworker.data.examples import Example, read_examples, to_batch
from rlworker.data.images import build_image_reader
from rlworker.data.rows import load_tokenizer
from rlworker.tracking.log import read_metrics
from rlworker.tracking.report import tell_report
from rlworker.tracking.run_folder import RunFolder
from rlworker.tracking.terminal import tell_start
from rlworker.tracking.trackers import check_trackers
from rlworker.trainers.sft import train_supervised
from rlworker.trainers.stop import Stop, ending_well


@dataclass(frozen=True)
class DemoConfig(RunConfig):
    """Settings of a demo: a RunConfig with a warm-up before it and a control beside it."""

    warm_up_steps: Annotated[int, Ge(1)] = 1000
    """Most supervised steps, of 256 questions each."""
    warm_up_loss: float = 0.5
    """The warm-up ends at this loss (nats per token), when less than half of the answers are right."""
    shuffle_rewards: bool = False
    """Control: hand out the same rewards at random. The model must then not get better."""


@dataclass(frozen=True)
class Toy:
    """A task for a demo to learn, made on the spot.

    Attributes:
        make_data: writes train.jsonl and heldout.jsonl into a folder. make_model: saves a model of a seed in a folder.
        warm_up: the optimizer's settings of the warm-up. rows: examples of each of its steps.
    """

    make_data: Callable[[Path], Path]
    make_model: Callable[[Path, int], Path]
    warm_up: dict
    rows: int = 256


# A high rate finds how digits add up, and flat weights, which GRPO learns from faster: it must not fall before that.
_WARM_UP = dict(lr=3e-3, min_lr=5e-4, lr_warmup_steps=50, lr_scheduler="linear", lr_decay_steps=1000, adam_beta2=0.98)
ADDITION = Toy(make_data, make_model, _WARM_UP | {"weight_decay": 0.01})

DEFAULT = DemoConfig(
    run_dir="runs/demo_cpu",
    data=DataConfig(max_prompt_tokens=8),
    actor=MegatronConfig(
        ranks=2,
        optimizer=OptimizerConfig(lr=7e-4, min_lr=1e-4, lr_scheduler="linear", lr_warmup_steps=40, adam_beta2=0.99),
    ),
    # Below 1 because the warm-up ends early: an unsure model would rarely sample what it would answer.
    rollout=VllmConfig(temperature=0.7, max_new_tokens=4, max_model_len=16, max_num_seqs=1024, kv_cache_mb=256),
    algorithm=AlgorithmConfig(mini_batches=4),
    steps=240,
    prompts_per_step=256,
    samples_per_prompt=8,
    eval_every=40,
)


def shuffle_advantage(advantage: advantages.AdvantageFn) -> advantages.AdvantageFn:
    """Make the control's advantage: the same numbers, from the batch's rewards in random order."""

    def shuffled_advantage(batch: TrainBatch):
        version, rewards = int(batch.require_column("versions").max()), batch.require_column("rewards")
        order = torch.from_numpy(np.random.default_rng(version).permutation(len(batch)))
        return advantage(replace(batch, rewards=rewards[order]))

    return shuffled_advantage


def draw_warm_up_batches(
    examples: list[Example], model: ModelSpec, config: DemoConfig, rows: int
) -> Iterator[TrainBatch]:
    """Yield a batch of ``rows`` questions with their answers for each step, drawn anew."""
    generator = np.random.default_rng([config.seed, 1])
    for _ in range(config.warm_up_steps):
        yield to_batch([examples[i] for i in generator.integers(0, len(examples), rows)], model.vision)


def warm_up(config: DemoConfig, toy: Toy, output: str) -> None:
    """Train the model on answers and save it in ``output``, on the same ranks and layout as the run."""
    tokenizer, model = load_tokenizer(config.model), ModelSpec.from_folder(config.model)
    image_reader = build_image_reader(model, config.run_dir, config.image_memory_mb)
    answers = SftConfig(model=config.model, data=config.data, max_answer_tokens=config.rollout.max_new_tokens)
    examples, _ = read_examples(config.data.train, tokenizer, answers, model, image_reader)
    batches = draw_warm_up_batches(examples, model, config, toy.rows)
    actor = replace(config.actor, optimizer=replace(config.actor.optimizer, **toy.warm_up))
    options: dict[str, Any] = dict(platform=config.platform, seed=config.seed, stop_below=config.warm_up_loss)
    losses = train_supervised(model, actor, batches, output, **options)
    print(f"warm-up: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def summarise(config: DemoConfig, wall_seconds: float, warm_up_seconds: float) -> dict:
    """Sum the run up in a few numbers."""
    lines = read_metrics(Path(config.run_dir))
    heldout = [line["heldout"] for line in lines if "heldout" in line]
    steps = [line for line in lines if "logprob_diff_mean" in line]
    actor = config.actor
    return {
        "heldout_before": heldout[0],
        "heldout_after": heldout[-1],
        "steps": len(steps),
        "wall_seconds": wall_seconds,
        "warm_up_seconds": warm_up_seconds,
        "logprob_diff_mean": max(line["logprob_diff_mean"] for line in steps),
        "logprob_diff_max": max(line["logprob_diff_max"] for line in steps),
        "seconds_per_step": float(np.median([line["time_step"] for line in steps])),
        "shuffle_rewards": config.shuffle_rewards,
        "seed": config.seed,
        "platform": describe(get_platform(config.platform)),
    } | {name: getattr(actor, name) for name in ("layout", "tp", "pp", "cp", "dp")}


def find_warm_model(config: DemoConfig) -> Path:
    """Return the folder of the warmed-up model, which GRPO starts from."""
    return Path(config.run_dir) / f"model_warm_seed{config.seed}"


def prepare(config: DemoConfig, toy: Toy) -> tuple[DemoConfig, RunFolder]:
    """Claim the run folder, make the data and the model, which take no engine, and check everything against them."""
    user_keys = [
        key for key, value in (("model", config.model), ("data", config.data.train or config.data.heldout)) if value
    ]
    if user_keys:
        raise ValueError(f"demo: --{user_keys[0]} is made on the spot; for your own use recipes.grpo")
    folder = Path(config.run_dir)
    files = {name: str(folder / "data" / f"{name}.jsonl") for name in ("train", "heldout")}
    config = replace(config, data=replace(config.data, **files))
    check_trackers(config.trackers)
    run = RunFolder(config.run_dir)
    run.claim(replace(config, model=str(find_warm_model(config))))
    toy.make_data(folder / "data")
    model = toy.make_model(folder / f"model_init_seed{config.seed}", config.seed)
    config = replace(config, model=str(model))
    config.check_models()
    return config, run


def main(config: DemoConfig, run: RunFolder, toy: Toy, stop: Stop) -> None:
    """Run the demo in ``config``, which ``prepare`` returned with its folder, and sum it up."""
    start = time.perf_counter()
    folder = Path(config.run_dir)
    warm_model = find_warm_model(config)
    advantage = advantages.configure_advantage(config.critic)
    if config.shuffle_rewards:
        advantage = shuffle_advantage(advantage)
    with running_ray(config.num_workers, config.platform):  # once for both parts
        tell_start("Ray is up")
        if not warm_model.exists():
            warm_up(config, toy, str(warm_model))
            tell_start("the model is warmed up")
        warm_up_seconds = time.perf_counter() - start
        parts: dict[str, Any] = dict(advantage=advantage, folder=run, stop=stop)
        with Trainer(replace(config, model=str(warm_model)), rewards.exact_match, **parts) as trainer:
            trainer.fit()
    if stop.signal:
        return  # there is more to come
    summary = summarise(config, time.perf_counter() - start, warm_up_seconds)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    print(tell_report(folder))


def run(default: DemoConfig, description: str | None, toy: Toy = ADDITION) -> None:
    """Run the demo as ``python -m`` does: settings from the command line, everything checked, the run."""
    config = parse_config(default, description)
    with ending_well() as stop:
        try:
            config, folder = prepare(config, toy)
        except ValueError as error:
            sys.exit(f"error: {error}")
        main(config, folder, toy, stop)


if __name__ == "__main__":
    run(DEFAULT, __doc__)
