"""Supervised training of a vision-language model on the answers of Geometry3K, or on any rows with images.

    python -m recipes.images.sft_vlm --model FOLDER           a Qwen2.5-VL or Qwen3-VL of up to 8 billion parameters
    python -m recipes.images.sft_vlm --smoke                  the same recipe, tiny, on a CPU

The vision tower is frozen (``--actor.freeze``). The checkpoint's ``hf`` is a HuggingFace folder from which every RL
recipe can start.
"""

from dataclasses import replace

from recipes.common.smoke import SftVlmRecipeConfig, parse_recipe_config
from recipes.images import grpo_geo3k
from rlworker import OptimizerConfig, launch_supervised

DEFAULT = SftVlmRecipeConfig(
    run_dir="runs/sft_vlm",
    data=replace(grpo_geo3k.DEFAULT.data, instruction="Give the answer alone."),
    actor=replace(
        grpo_geo3k.DEFAULT.actor,
        optimizer=OptimizerConfig(lr=1e-5, lr_scheduler="cosine", lr_warmup_steps=10, weight_decay=0.01),
        freeze=("vision",),
    ),
    rows_per_step=128,
    steps=50,
    eval_every=10,
)

if __name__ == "__main__":
    launch_supervised(parse_recipe_config(DEFAULT, __doc__))
