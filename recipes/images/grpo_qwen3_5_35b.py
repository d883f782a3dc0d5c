"""GRPO of Qwen3.5-35B-A3B or Qwen3.6-35B-A3B, a mixture of 256 experts that sees images and whose layers mostly keep a
state, on the geometry problems of recipes.images.grpo_geo3k.

    python -m recipes.images.grpo_qwen3_5_35b --model FOLDER        one of these two, or a mixture of their size
    python -m recipes.images.grpo_qwen3_5_35b --smoke               the same recipe, tiny, on a CPU

In full, which is untested: one machine of eight devices of 80 GB, which trainers and vLLM engines use in turn, and with
``--platform npu`` one of sixteen of 64 GB; the rates of recipes.sized.grpo_qwen3_30b.
"""

from dataclasses import replace

from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from recipes.images import grpo_qwen3_vl_30b
from rlworker import launch, one_turn

BASE = grpo_qwen3_vl_30b.DEFAULT
DEFAULT = replace(
    BASE,
    run_dir="runs/grpo_qwen3_5_35b",
    actor=replace(
        BASE.actor,
        tp=2,  # as many as the model has key-value heads
        micro_batch_tokens=8192,
        optimizer=replace(BASE.actor.optimizer, offload_fraction=0.5),
    ),
    rollout=replace(BASE.rollout, engines=2, tp=4),
    smoke_model="qwen3_5_moe",
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
