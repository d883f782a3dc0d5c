"""GRPO steps of TRL, for ``step.py --model FOLDER --trl PYTHON``, which runs this file in TRL's own environment.

    PYTHON scripts/bench/trl_step.py MODEL ROWS STEPS PROMPTS SAMPLES NEW_TOKENS

Prints JSON: medians of the steps but the first, in seconds, ``wall step`` and ``cpu step``.
"""

import json
import statistics
import sys
import time

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]  in TRL's environment alone
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

MODEL, ROWS, *_SIZES = sys.argv[1:]
STEPS, PROMPTS, SAMPLES, NEW_TOKENS = map(int, _SIZES)


def reward(completions, **_) -> list[float]:
    """Score each completion as ``step.py`` does."""
    return [len(set(completion[0]["content"])) / NEW_TOKENS for completion in completions]


class Clock(TrainerCallback):
    """Keeps the wall and the CPU seconds at the end of each step."""

    def __init__(self):
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_, **__):
        """Take both."""
        self.ends.append((time.perf_counter(), time.process_time()))


def main() -> None:
    torch.set_num_threads(1)
    with open(ROWS) as file:
        rows = [{"prompt": json.loads(line)["prompt"]} for line in file]
    config = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
        # A half of the samples at a time: the logits of all of them are large.
        per_device_train_batch_size=PROMPTS * SAMPLES // 2,
        gradient_accumulation_steps=2,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        max_steps=STEPS,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    clock, data = Clock(), Dataset.from_list(rows)
    GRPOTrainer(MODEL, reward, args=config, train_dataset=data, callbacks=[clock]).train()
    wall, cpu = zip(*((after[0] - end[0], after[1] - end[1]) for end, after in zip(clock.ends, clock.ends[1:])))
    medians = {"wall step": statistics.median(wall), "cpu step": statistics.median(cpu)}
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
