"""GRPO on your own model and your own questions.

    python -m recipes.grpo --model FOLDER --run-dir runs/mine --data.train train.jsonl --data.heldout heldout.jsonl

Copy this file to write your own recipe: the reward is any function ``reward(text, row) -> float``, the advantage any
``advantage(batch) -> [N]`` and the loss any ``loss(outputs, batch) -> (sum, metric sums)``.
"""

from recipes.common.numbers import find_number, is_number
from rlworker import Row, RunConfig, launch, one_turn, parse_config


def find_answer(text: str, row: Row) -> str:
    """Find the last number in a text, or its last line if the row's answer is no number."""
    return find_number(text) if is_number(row.answer) else text.strip().rpartition("\n")[2].strip()


def reward(text: str, row: Row) -> float:
    """Return 1 where the text ends in the row's answer."""
    return float(find_answer(text, row) == find_answer(row.answer, row) != "")


DEFAULT = RunConfig()

if __name__ == "__main__":
    launch(parse_config(DEFAULT, __doc__), one_turn(reward, find_answer))
