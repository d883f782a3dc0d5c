"""GRPO of Qwen3-30B-A3B, a mixture of 128 experts (Yang et al. 2025, https://arxiv.org/abs/2505.09388), on competition
mathematics: the questions of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476).

    python -m recipes.sized.grpo_qwen3_30b --model FOLDER        Qwen3-30B-A3B, or a mixture of its size
    python -m recipes.sized.grpo_qwen3_30b --smoke               the same recipe, tiny, on a CPU

In full, which is untested: one machine of eight devices of 80 GB, which trainers and vLLM engines use in turn; with
``--platform`` the sizes of a node of that platform. Each rollout is one optimizer step: after a step a token may go to
other experts, and its probability would jump further than PPO's clip expects.
"""

from recipes import dapo_math
from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import RecipeConfig, parse_recipe_config
from rlworker import (
    CheckpointConfig,
    EnvironmentConfig,
    MegatronConfig,
    OptimizerConfig,
    PlacementConfig,
    VllmConfig,
    launch,
    one_turn,
)

DEFAULT = RecipeConfig(
    run_dir="runs/grpo_qwen3_30b",
    data=dapo_math.DEFAULT.data,
    actor=MegatronConfig(
        ranks=8,
        tp=4,  # as many as the model has key-value heads
        ep=8,
        dtype="bfloat16",
        recompute="full",
        optimizer=OptimizerConfig(lr=1e-6, lr_warmup_steps=10, weight_decay=0.1, offload_fraction=0.25),
    ),
    rollout=VllmConfig(engines=4, tp=2, max_new_tokens=8192, max_model_len=9216, dtype="bfloat16", kv_cache_mb=24576),
    environment=EnvironmentConfig(workers=8),
    placement=PlacementConfig(colocate=True),
    steps=200,
    prompts_per_step=128,
    samples_per_prompt=8,
    checkpoint=CheckpointConfig(save_every=20),
    smoke_model="qwen3_moe",
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
