"""GRPO on your own model and your own questions.

    python -m recipes.grpo --model FOLDER --run-dir runs/mine --data.train train.jsonl --data.heldout heldout.jsonl

Copy this file to write your own recipe: the reward is any function ``reward(text, row) -> float``, the advantage any
``advantage(batch) -> [N]`` and the loss any ``loss(outputs, batch) -> (sum, metric sums)``.
"""

import re
from decimal import Context, Decimal

from rlworker import Row, RunConfig, launch, one_turn, parse_config

NUMBER = re.compile(r"(?<![A-Za-z\d.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?")


def find_answer(text: str, row: Row) -> str:
    """Find the last number in a text, or its last line if the row's answer is no number."""
    if not NUMBER.fullmatch(row.answer.strip()):
        return text.strip().rpartition("\n")[2].strip()
    number = (NUMBER.findall(text) or [""])[-1].replace(",", "")
    return f"{Decimal(number).normalize(Context(len(number))):f}" if number else ""


def reward(text: str, row: Row) -> float:
    """Return 1 where the text ends in the row's answer."""
    return float(find_answer(text, row) == find_answer(row.answer, row) != "")


DEFAULT = RunConfig()

if __name__ == "__main__":
    launch(parse_config(DEFAULT, __doc__), one_turn(reward, find_answer))
