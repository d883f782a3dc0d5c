"""DAPO on competition mathematics (Yu et al. 2025, https://arxiv.org/abs/2503.14476): clip-higher, dynamic sampling, a
penalty for answers that run long, every token of a mini-batch counting alike, no KL.

    python -m recipes.dapo_math --model FOLDER         a base or instruct model of up to 8 billion parameters
    python -m recipes.dapo_math --smoke                the same recipe, tiny, on a CPU
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
    Row,
    VllmConfig,
    launch,
    one_turn,
)

DEFAULT = RecipeConfig(
    run_dir="runs/dapo_math",
    data=DataConfig(
        "hf:open-r1/DAPO-Math-17k-Processed/en:train",
        answer_field="solution",
        instruction=INSTRUCTION,
        max_prompt_tokens=1024,
        skip_long_prompts=True,
    ),
    actor=MegatronConfig(
        ranks=8,
        tp=4,
        dtype="bfloat16",
        recompute="full",
        optimizer=OptimizerConfig(
            lr=1e-6,
            lr_warmup_steps=20 * 16,  # optimizer steps: the paper's 20 rollouts
            weight_decay=0.1,
        ),
    ),
    rollout=VllmConfig(engines=4, max_new_tokens=8192, max_model_len=9216, dtype="bfloat16", kv_cache_mb=32768),
    algorithm=AlgorithmConfig(name="dapo", mini_batches=16),
    environment=EnvironmentConfig(workers=8, default_reward=-1.0),
    steps=200,
    prompts_per_step=512,
    samples_per_prompt=16,
    checkpoint=CheckpointConfig(save_every=20),
)


def right_or_wrong(text: str, row: Row) -> float:
    """Return 1 where the answer is right, else -1: the scale that the penalty is made for (the paper, equation 7)."""
    return 2 * math_reward(text, row) - 1


if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(right_or_wrong, find_answer))
