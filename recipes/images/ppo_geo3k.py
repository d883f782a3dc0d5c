"""PPO with a critic that sees images, on the geometry problems of Geometry3K (Lu et al. 2021,
https://arxiv.org/abs/2105.04165), each with a figure.

    python -m recipes.images.ppo_geo3k --model FOLDER     a Qwen2.5-VL, Qwen3-VL or Gemma 3 of 4 to 8 billion parameters
    python -m recipes.images.ppo_geo3k --smoke            the same recipe, tiny, on a CPU

In full, which is untested: eight training ranks that hold actor, reference and critic, and four vLLM engines, each on a
device of 80 GB; with ``--platform`` the sizes of a node of that platform.
"""

from dataclasses import replace

from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from recipes.images.grpo_geo3k import DEFAULT as GRPO
from rlworker import AlgorithmConfig, CriticConfig, launch, one_turn

DEFAULT = replace(
    GRPO,
    run_dir="runs/ppo_geo3k",
    actor=replace(GRPO.actor, micro_batch_tokens=8192),  # beside a critic
    algorithm=AlgorithmConfig(kl_coef=0.001, kl_in="reward", mini_batches=4),
    critic=CriticConfig(train=True, lr=1e-5, clip=0.5, lam=1.0, warmup_steps=10),
    prompts_per_step=1024,
    samples_per_prompt=1,
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
