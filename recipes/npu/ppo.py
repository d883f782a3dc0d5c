"""PPO on GSM8K on one Ascend node of sixteen cards with 64 GB each: recipes.ppo_gsm8k at that node's sizes.

bash scripts/ray_up.sh head && RAY_ADDRESS=auto python -m recipes.npu.ppo --model FOLDER
python -m recipes.npu.ppo --smoke                  the same recipe, tiny, the NPU emulated on a CPU

In full, which is untested: eight ranks for actor, reference and critic, and eight vLLM engines.
"""

from dataclasses import replace

from recipes import ppo_gsm8k
from recipes.common.mathematics import math_reward
from recipes.common.smoke import recipe_config
from recipes.npu import grpo as grpo_npu
from rlworker import launch

DEFAULT = replace(
    ppo_gsm8k.DEFAULT,
    run_dir="runs/ppo_npu",
    platform=grpo_npu.DEFAULT.platform,
    rollout=grpo_npu.DEFAULT.rollout,
)

if __name__ == "__main__":
    launch(recipe_config(DEFAULT, __doc__), math_reward)
