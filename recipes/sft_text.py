"""Supervised training on the worked solutions of GSM8K, or on any rows of prompt and answer.

    python -m recipes.sft_text --model FOLDER          a base or instruct model of up to 8 billion parameters
    python -m recipes.sft_text --smoke                 the same recipe, tiny, on a CPU

The solutions are learned as they stand there, their calculator's marks (<<48/2=24>>) included. The checkpoint's ``hf``
is a HuggingFace folder that every RL recipe can start from.
"""

from dataclasses import replace

from recipes import grpo_gsm8k
from recipes.common.smoke import SftRecipeConfig, parse_recipe_config
from rlworker import OptimizerConfig, launch_supervised

DEFAULT = SftRecipeConfig(
    run_dir="runs/sft_text",
    data=replace(grpo_gsm8k.DEFAULT.data, instruction="Reason step by step, and end with #### and the final answer."),
    actor=replace(
        grpo_gsm8k.DEFAULT.actor,
        optimizer=OptimizerConfig(lr=1e-5, lr_scheduler="cosine", lr_warmup_steps=10, weight_decay=0.01),
    ),
    rows_per_step=128,
    steps=175,
    eval_every=25,
)

if __name__ == "__main__":
    launch_supervised(parse_recipe_config(DEFAULT, __doc__))
