"""A language model learns to add on a laptop CPU, with nothing stubbed: Ray, Megatron-core, vLLM.

A tiny Qwen3 and its questions ("23+45=" -> "068") are made on the spot, warmed up on answers until it is right in
a third to a half of them, then trained by GRPO from the reward alone. Held-out questions are never trained on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.models.spec import ModelSpec
from recipes.common.addition import make_data, make_model
from recipes.common.toys import Toy, ToyConfig, run_toy
from rlworker import AlgorithmConfig, DataConfig, MegatronConfig, OptimizerConfig, SftConfig, TrainBatch, VllmConfig
from rlworker.data import make_image_reader
from rlworker.data.examples import Example, read_examples, to_batch
from rlworker.data.rows import load_tokenizer
from rlworker.trainers.sft import train_supervised


@dataclass(frozen=True)
class DemoConfig(ToyConfig):
    """Settings of a demo: a toy that is warmed up on answers."""

    warm_up_loss: float = 0.5
    """The warm-up ends at this loss (nats per token), when less than half of the answers are right."""


def draw_warm_up_batches(
    examples: list[Example], model: ModelSpec, config: DemoConfig, rows: int
) -> Iterator[TrainBatch]:
    """Yield a batch of ``rows`` questions with their answers for each step, drawn anew."""
    generator = np.random.default_rng([config.seed, 1])
    for _ in range(config.warm_up_steps):
        yield to_batch([examples[i] for i in generator.integers(0, len(examples), rows)], model.vision)


def warm_up_on_answers(optimizer: dict, rows: int = 256) -> Callable[[DemoConfig, str], None]:
    """Make a toy's warm-up on answers, on the same ranks and layout as the run.

    Args:
        optimizer: settings of it that differ from the run's. rows: examples of each step.
    """

    def warm_up(config: DemoConfig, output: str) -> None:
        tokenizer, model = load_tokenizer(config.model), ModelSpec.from_folder(config.model)
        image_reader = make_image_reader(model, config.run_dir, config.image_memory_mb)
        answers = SftConfig(model=config.model, data=config.data, max_answer_tokens=config.rollout.max_new_tokens)
        examples, _ = read_examples(config.data.train, tokenizer, answers, model, image_reader)
        batches = draw_warm_up_batches(examples, model, config, rows)
        actor = replace(config.actor, optimizer=replace(config.actor.optimizer, **optimizer))
        options: dict[str, Any] = dict(platform=config.platform, seed=config.seed, stop_below=config.warm_up_loss)
        losses = train_supervised(model, actor, batches, output, **options)
        print(f"warm-up: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")

    return warm_up


# A high rate finds how digits add up, and flat weights, which GRPO learns from faster: it must not fall before that.
_WARM_UP = dict(lr=3e-3, min_lr=5e-4, lr_warmup_steps=50, lr_scheduler="linear", lr_decay_steps=1000, adam_beta2=0.98)
ADDITION = Toy(make_data, make_model, warm_up_on_answers(_WARM_UP | {"weight_decay": 0.01}))

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

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, ADDITION)
