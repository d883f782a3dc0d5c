"""On-policy distillation: the student samples and learns at every token from a teacher's distribution (Agarwal et al.
2023, https://arxiv.org/abs/2306.13649). The reward is reported and not learned.

    python -m recipes.distill --model STUDENT --algorithm.reference TEACHER
    python -m recipes.distill --model STUDENT --distill.teachers openai/gsm8k TEACHER other TEACHER
    python -m recipes.distill --smoke                  the same recipe, tiny, on a CPU
"""

from dataclasses import replace

from recipes import grpo_gsm8k
from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from rlworker import AlgorithmConfig, DistillConfig, launch, one_turn

DEFAULT = replace(
    grpo_gsm8k.DEFAULT,
    run_dir="runs/distill",
    # TEACHER is no folder: the run and the plan ask for one by its option.
    algorithm=AlgorithmConfig(name="distill", reference="TEACHER"),
    distill=DistillConfig(top_k=32),
    samples_per_prompt=4,
    steps=100,
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
