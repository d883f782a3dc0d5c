"""GRPO on the questions of GSM8K with a reward of two parts: a checked answer, and a judge of the steps.

    python -m recipes.served.judge_and_math --model FOLDER --models.judge.model JUDGE
    python -m recipes.served.judge_and_math --model FOLDER --models.judge.model JUDGE --models.judge.weight 0
    python -m recipes.served.judge_and_math --smoke           the same recipe, tiny, on a CPU

The second line reports the judge's verdicts and learns from the checked answers alone. A judge is any instruct model;
``recipes/served/judge.toml`` asks it. In full, which is untested: eight training ranks, four engines of the policy and
two of the judge, each on a device of 80 GB.
"""

from dataclasses import replace
from pathlib import Path

from recipes import grpo_gsm8k
from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import parse_recipe_config
from rlworker import ServedModelConfig, combine_parts, launch

DEFAULT = replace(
    grpo_gsm8k.DEFAULT,
    run_dir="runs/judge_and_math",
    models={
        # JUDGE is no folder: the run and the plan ask for one by its option.
        "judge": ServedModelConfig(
            "JUDGE",
            template=str(Path(__file__).parent / "judge.toml"),
            engines=2,
            max_model_len=4096,
            weight=0.2,
        )
    },
)

if __name__ == "__main__":
    config = parse_recipe_config(DEFAULT, __doc__)
    launch(config, combine_parts({"math": math_reward}, config.models, answer=find_answer))
