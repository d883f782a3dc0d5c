"""GRPO on your own model and your own questions.

    python -m recipes.grpo --model FOLDER --run-dir runs/mine --data.train train.jsonl --data.heldout heldout.jsonl

Copy this file to write your own recipe: the reward is any function ``reward(text, row) -> float``, the advantage any
``advantage(batch) -> [N]`` and the loss any ``loss(outputs, batch) -> (sum, metric sums)``.
"""

import tyro

from rlworker.config import RunConfig
from rlworker.data import Row
from rlworker.launch import launch


def reward(text: str, row: Row) -> float:
    """1 where the answer stands anywhere in the completion's last line."""
    lines = text.strip().splitlines()
    return float(bool(lines) and row.answer in lines[-1])


DEFAULT = RunConfig()

if __name__ == "__main__":
    launch(tyro.cli(RunConfig, default=DEFAULT, description=__doc__), reward)
