"""GRPO on the geometry problems of Geometry3K (Lu et al. 2021, https://arxiv.org/abs/2105.04165), each with a figure.

    python -m recipes.images.grpo_geo3k --model FOLDER        a Qwen2.5-VL or Qwen3-VL of 7 or 8 billion parameters
    python -m recipes.images.grpo_geo3k --smoke               the same recipe, tiny, on a CPU

In full, which is untested: eight training ranks and four vLLM engines, each on a device of 80 GB; with ``--platform``
the sizes of a node of that platform.
"""

from recipes.common.mathematics import INSTRUCTION, find_answer, math_reward
from recipes.common.smoke import VlmRecipeConfig, parse_recipe_config
from rlworker import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    MegatronConfig,
    OptimizerConfig,
    VllmConfig,
    launch,
    one_turn,
)

DEFAULT = VlmRecipeConfig(
    run_dir="runs/grpo_geo3k",
    data=DataConfig(
        "hf:hiyouga/geometry3k:train",
        "hf:hiyouga/geometry3k:test",
        prompt_field="problem",
        instruction=INSTRUCTION,
        max_prompt_tokens=2048,
        skip_long_prompts=True,
    ),
    actor=MegatronConfig(
        ranks=8, tp=4, dtype="bfloat16", recompute="full", optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.01)
    ),
    rollout=VllmConfig(engines=4, max_new_tokens=2048, max_model_len=4096, dtype="bfloat16", kv_cache_mb=32768),
    algorithm=AlgorithmConfig(kl_coef=0.001, mini_batches=4),
    environment=EnvironmentConfig(workers=8),
    steps=120,
    prompts_per_step=256,
    samples_per_prompt=5,
    eval_every=10,
    checkpoint=CheckpointConfig(save_every=20),
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
