"""GRPO on the grade-school questions of GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).

    python -m recipes.grpo_gsm8k --model FOLDER        an instruct model of up to 8 billion parameters
    python -m recipes.grpo_gsm8k --smoke               the same recipe, tiny, on a CPU

In full, which is untested: eight training ranks and four vLLM engines, each on a device of 80 GB; with ``--platform``
the sizes of a node of that platform.
"""

from recipes.common.mathematics import INSTRUCTION, find_answer, math_reward
from recipes.common.smoke import RecipeConfig, parse_recipe_config
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

DEFAULT = RecipeConfig(
    run_dir="runs/grpo_gsm8k",
    data=DataConfig(
        "hf:openai/gsm8k/main:train",
        "hf:openai/gsm8k/main:test",
        prompt_field="question",
        instruction=INSTRUCTION,
        max_prompt_tokens=512,
    ),
    actor=MegatronConfig(
        ranks=8, tp=4, dtype="bfloat16", recompute="full", optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.01)
    ),
    rollout=VllmConfig(engines=4, max_new_tokens=1024, max_model_len=1536, dtype="bfloat16", kv_cache_mb=32768),
    algorithm=AlgorithmConfig(kl_coef=0.001, mini_batches=4),
    environment=EnvironmentConfig(workers=8),
    steps=435,
    prompts_per_step=256,
    samples_per_prompt=5,
    eval_every=10,
    checkpoint=CheckpointConfig(save_every=50),
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
