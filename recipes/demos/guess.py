"""A language model guesses a number within three turns: after each guess it is told whether the number is smaller.

``42-48:`` -> it guesses ``45``, reads ``<``, guesses ``43``, reads ``>``, guesses ``44``. Seven numbers and three
guesses leave no room for anything but halving. Ranges that are held out are never trained on.
"""

import zlib
from itertools import product
from pathlib import Path

from recipes.common.addition import make_model, write_rows
from recipes.common.plays import PlayConfig, warm_up_on_plays
from recipes.common.toys import Toy, run_toy
from rlworker import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    Episode,
    MegatronConfig,
    OptimizerConfig,
    Policy,
    Row,
    VllmConfig,
)

TURNS = 3
NUMBERS = 2**TURNS - 1
"""Numbers of the longest range, which three guesses can tell apart."""


async def play(policy: Policy, row: Row) -> Episode:
    """Guess until the number is found, or the turns are over."""
    episode = Episode(row)
    for _ in range(TURNS):
        guess = (await policy.sample(episode)).text
        if guess == row.answer:
            episode.reward(1.0)
            break
        episode.observe("<" if row.answer < guess else ">")
    return episode


def say_middle(row: Row, turn: int) -> str:
    """Say the middle of what is left after so many turns."""
    low, high = map(int, row.prompt[:-1].split("-"))
    for _ in range(turn):
        middle = (low + high) // 2
        low, high = (low, middle - 1) if int(row.answer) < middle else (middle + 1, high)
    return f"{(low + high) // 2:02d}"


def make_data(folder: Path) -> Path:
    """Write a row for each number of each range below 100, a tenth of the ranges as held out."""
    rows: dict[str, list[dict]] = {"train": [], "heldout": []}
    for low, size in product(range(101 - NUMBERS), range(NUMBERS - 2, NUMBERS + 1)):
        prompt = f"{low:02d}-{low + size - 1:02d}:"
        part = rows["train" if zlib.crc32(prompt.encode()) % 10 else "heldout"]
        part += [{"prompt": prompt, "answer": f"{number:02d}"} for number in range(low, low + size)]
    return write_rows(folder, rows)


_WARM_UP = dict(lr=2e-3, lr_warmup_steps=20, lr_scheduler="constant", adam_beta2=0.99)
GUESS = Toy(make_data, make_model, warm_up_on_plays(play, say_middle, _WARM_UP), play)
DEFAULT = PlayConfig(
    run_dir="runs/guess",
    data=DataConfig(max_prompt_tokens=8),
    actor=MegatronConfig(
        ranks=2,
        optimizer=OptimizerConfig(lr=5e-4, min_lr=5e-5, lr_scheduler="linear", lr_warmup_steps=10, adam_beta2=0.99),
    ),
    rollout=VllmConfig(temperature=0.5, max_new_tokens=3, max_model_len=32, max_num_seqs=1024, kv_cache_mb=256),
    environment=EnvironmentConfig(turns=TURNS, tokens=32),
    algorithm=AlgorithmConfig(mini_batches=4, clip_high=0.28),
    steps=240,
    prompts_per_step=128,
    samples_per_prompt=8,
    eval_every=20,
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, GUESS)
