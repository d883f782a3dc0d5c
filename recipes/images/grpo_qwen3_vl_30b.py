"""GRPO of Qwen3-VL-30B-A3B, a mixture of 128 experts that sees images (Bai et al. 2025,
https://arxiv.org/abs/2511.21631), on the geometry problems of recipes.images.grpo_geo3k.

    python -m recipes.images.grpo_qwen3_vl_30b --model FOLDER        Qwen3-VL-30B-A3B, or a mixture of its size
    python -m recipes.images.grpo_qwen3_vl_30b --smoke               the same recipe, tiny, on a CPU

In full, which is untested: on the devices, and with the rates, of recipes.sized.grpo_qwen3_30b.
"""

from dataclasses import replace

from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from recipes.images import grpo_geo3k
from recipes.sized import grpo_qwen3_30b
from rlworker import launch, one_turn

DEFAULT = replace(
    grpo_geo3k.DEFAULT,
    run_dir="runs/grpo_qwen3_vl_30b",
    actor=grpo_qwen3_30b.DEFAULT.actor,
    rollout=replace(grpo_geo3k.DEFAULT.rollout, engines=4, tp=2, kv_cache_mb=24576),
    algorithm=grpo_qwen3_30b.DEFAULT.algorithm,  # without a reference model
    placement=grpo_qwen3_30b.DEFAULT.placement,
    prompts_per_step=128,
    samples_per_prompt=8,
    smoke_model="qwen3_vl_moe",
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
