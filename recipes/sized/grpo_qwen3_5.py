"""GRPO of a Qwen3.5, whose layers keep a state where others attend to all tokens, on the questions of GSM8K.

    python -m recipes.sized.grpo_qwen3_5 --model FOLDER        a dense Qwen3.5 of up to 9 billion parameters
    python -m recipes.sized.grpo_qwen3_5 --smoke               the same recipe, tiny, on a CPU

In full, which is untested: the devices, sizes and rates of recipes.grpo_gsm8k. Prompts are computed once a group, and
states are handed on to the samples.
"""

from dataclasses import replace

from recipes import grpo_gsm8k
from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from rlworker import launch, one_turn

DEFAULT = replace(grpo_gsm8k.DEFAULT, run_dir="runs/grpo_qwen3_5", smoke_model="qwen3_5_text")

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), one_turn(math_reward, find_answer))
