"""A vision-language model asks for a part of an image, sees it from near and names what is there.

From afar four panels are seen, of which three are blank. It says which panel it wants, gets it as a further image,
and names the colour and the number of the squares on it. Held-out images are never trained on.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from recipes.common import squares
from recipes.common.addition import write_rows
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

PANELS = {str(number + 1): (number % 2, number // 2) for number in range(4)}
"""Name of a panel -> its column and row."""


async def play(policy: Policy, row: Row) -> Episode:
    """Show the panel that the model asks for, and ask what is on it."""
    episode = Episode(row)
    wish = (await policy.sample(episode)).text
    if wish not in PANELS:
        return episode
    episode.observe("<image> ?", images=[crop_panel(row.source["board"], wish)])
    sample = await policy.sample(episode)
    episode.reward(float(sample.text == row.answer))
    return episode


def crop_panel(path: str, name: str) -> Image.Image:
    """Cut a panel out of the image of all four."""
    left, top = (squares.SIDE * place for place in PANELS[name])
    with Image.open(path) as board:
        return board.crop((left, top, left + squares.SIDE, top + squares.SIDE))


def say_right(row: Row, turn: int) -> str:
    """Say which panel has squares, then what is on it."""
    return (row.source["panel"], row.answer)[turn]


def draw_board(generator: np.random.Generator) -> tuple[Image.Image, Image.Image, str, str]:
    """Draw the board, what is seen of it from afar, and say which panel has squares and what they are."""
    panel, answer = squares.draw_image(generator)
    name, side = str(generator.integers(len(PANELS)) + 1), squares.SIDE
    blank = tuple(generator.integers(140, 256, 3).tolist())
    board, afar = Image.new("RGB", (2 * side, 2 * side), blank), Image.new("RGB", (side, side), blank)
    left, top = PANELS[name]
    board.paste(panel, (side * left, side * top))
    afar.paste((30, 30, 30), (side // 2 * left, side // 2 * top, side // 2 * (left + 1), side // 2 * (top + 1)))
    return board, afar, name, answer


def make_data(folder: Path, counts: dict[str, int] = squares.IMAGE_COUNTS) -> Path:
    """Write boards, what is seen of them from afar, and train.jsonl and heldout.jsonl that name them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[dict]] = {name: [] for name in counts}
    for seed, (name, count) in enumerate(counts.items()):
        generator = np.random.default_rng(seed)
        for number in range(count):
            board, afar, panel, answer = draw_board(generator)
            path = f"images/{name}_{number:04d}.png"
            afar.save(folder / path)
            board.save(whole := (folder / path).with_suffix(".board.png").resolve())
            row = {"prompt": "<bos> <image> ?", "images": [path], "board": str(whole), "panel": panel}
            parts[name].append(row | {"answer": answer})
    return write_rows(folder, parts)


_WARM_UP = dict(lr=1e-3, lr_warmup_steps=30, lr_scheduler="constant", adam_beta2=0.98, weight_decay=0.01)
LOOK_AGAIN = Toy(make_data, squares.make_model, warm_up_on_plays(play, say_right, _WARM_UP), play)
DEFAULT = PlayConfig(
    run_dir="runs/look_again",
    data=DataConfig(max_prompt_tokens=16),
    actor=MegatronConfig(
        ranks=2,
        optimizer=OptimizerConfig(lr=5e-4, min_lr=5e-5, lr_scheduler="linear", lr_warmup_steps=5, adam_beta2=0.99),
    ),
    rollout=VllmConfig(max_new_tokens=3, max_model_len=48, max_num_seqs=512, kv_cache_mb=256),
    environment=EnvironmentConfig(turns=2, tokens=48),
    algorithm=AlgorithmConfig(mini_batches=2),
    steps=140,
    prompts_per_step=64,
    samples_per_prompt=8,
    eval_every=20,
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, LOOK_AGAIN)
