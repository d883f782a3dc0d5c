"""PPO on GSM8K: the same questions as recipes.grpo_gsm8k, a critic in place of groups.

    python -m recipes.ppo_gsm8k --model FOLDER         an instruct model of up to 8 billion parameters
    python -m recipes.ppo_gsm8k --smoke                the same recipe, tiny, on a CPU

The sizes are those of recipes.grpo_gsm8k, and just as untested.
"""

from dataclasses import replace

from recipes import grpo_gsm8k
from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from rlworker import AlgorithmConfig, CriticConfig, launch, one_turn

DEFAULT = replace(
    grpo_gsm8k.DEFAULT,
    run_dir="runs/ppo_gsm8k",
    algorithm=AlgorithmConfig(kl_coef=0.001, kl_in="reward", mini_batches=4),
    critic=CriticConfig(train=True, lr=1e-5, clip=0.5, lam=1.0, warmup_steps=10),
    prompts_per_step=1024,
    samples_per_prompt=1,
    steps=105,
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
