"""GRPO on GSM8K on one Ascend node of sixteen cards with 64 GB each: recipes.grpo_gsm8k at that node's sizes.

bash scripts/ray_up.sh head && RAY_ADDRESS=auto python -m recipes.npu.grpo --model FOLDER
python -m recipes.npu.grpo --smoke                 the same recipe, tiny, the NPU emulated on a CPU

In full, which is untested: eight training ranks and eight vLLM engines. docs/ascend.md has the settings of the machine.
"""

from dataclasses import replace

from hardware.npu.platform import NpuPlatform
from recipes import grpo_gsm8k
from recipes.common.mathematics import math_reward
from recipes.common.smoke import recipe_config
from rlworker import launch

DEFAULT = replace(
    grpo_gsm8k.DEFAULT,
    run_dir="runs/grpo_npu",
    platform=NpuPlatform.name,
    rollout=replace(grpo_gsm8k.DEFAULT.rollout, engines=8, kv_cache_mb=24576),
)

if __name__ == "__main__":
    launch(recipe_config(DEFAULT, __doc__), math_reward)
