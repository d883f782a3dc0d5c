"""GRPO on the questions of GSM8K with a reward of two parts: a checked answer, and a judge of the steps.

    python -m recipes.served.judge_and_math --model FOLDER --models.judge.model JUDGE
    python -m recipes.served.judge_and_math --model FOLDER --models.judge.model JUDGE --models.judge.weight 0
    python -m recipes.served.judge_and_math --smoke           the same recipe, tiny, on a CPU

The second line reports the judge's verdicts and learns from the checked answers alone. ``--shuffle-rewards`` is the
control. A judge is any instruct model; ``recipes/served/judge.toml`` asks it. In full, which is untested: eight
training ranks, four engines of the policy and two of the judge, each on a device of 80 GB.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import grpo_gsm8k
from recipes.common.mathematics import find_answer, math_reward
from recipes.common.smoke import RecipeConfig, parse_recipe_config
from rlworker import ServedModelConfig, combine_parts, launch


@dataclass(frozen=True)
class JudgeConfig(RecipeConfig):
    """Settings of the recipe: a RecipeConfig with a control beside it."""

    shuffle_rewards: bool = False
    """Control: hand out the same rewards at random. The model must then not get better."""


# JUDGE is no folder: the run and the plan ask for one by its option.
JUDGE = ServedModelConfig(
    "JUDGE",
    template=str(Path(__file__).parent / "judge.toml"),
    engines=2,
    max_model_len=4096,
    weight=0.2,
)
_OWN: dict[str, Any] = dict(run_dir="runs/judge_and_math", models={"judge": JUDGE})
DEFAULT = JudgeConfig(**vars(grpo_gsm8k.DEFAULT) | _OWN)

if __name__ == "__main__":
    config, parts = parse_recipe_config(DEFAULT, __doc__), dict[str, Any]()
    if config.shuffle_rewards:
        from recipes.common.toys import shuffle_advantage
        from rlworker.algorithms.objective import configure_advantage

        parts["advantage"] = shuffle_advantage(configure_advantage(config))
    launch(config, combine_parts({"math": math_reward}, config.models, answer=find_answer), **parts)
