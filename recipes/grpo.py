"""GRPO on your own model and your own questions.

    python -m recipes.grpo --model FOLDER --run-dir runs/mine --data.train train.jsonl --data.heldout heldout.jsonl

Copy this file to write your own recipe: the reward is any function ``reward(text, row) -> float``, the advantage any
``advantage(batch) -> [N]`` and the loss any ``loss(outputs, batch) -> (sum, metric sums)``.
"""

import re
from decimal import Decimal

from rlworker import Row, RunConfig, launch, parse_config

NUMBER = re.compile(r"(?<![A-Za-z\d.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def find_last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def reward(text: str, row: Row) -> float:
    """Return 1 where the last number is the answer, or the last line if the answer is no number."""
    answer, last_line = row.answer.strip(), text.strip().rpartition("\n")[2].strip()
    if NUMBER.fullmatch(answer):
        return float(find_last_number(text) == find_last_number(answer))
    return float(answer != "" and last_line == answer)


DEFAULT = RunConfig()

if __name__ == "__main__":
    launch(parse_config(DEFAULT, __doc__), reward)
