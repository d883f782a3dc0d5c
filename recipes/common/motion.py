"""Videos of a square that moves, and a tiny Qwen3-VL that is asked which way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from recipes.common import squares
from recipes.common.addition import write_rows
from rlworker.checks.tiny_models import make_tiny_vlm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Answer -> to the right and down."""
FRAMES, MILLISECONDS = 4, 250
SIDE, SQUARE, STEP, MARGIN = squares.SIDE, 10, 9, 9
"""Pixels of a frame and of the square, and those that it moves by and is at most away from a corner at first."""
WORDS = ("?", *WAYS, "<0.1", "<0.6", "seconds>")
VIDEO_COUNTS = {"train": 2048, "heldout": 256}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per word, those of the videos' times among them."""
    return squares.make_tokenizer(WORDS)


def make_model(folder: Path, seed: int) -> Path:
    """Save a Qwen3-VL of random parameters, with its tokenizer and its processors."""
    shared = dict(initializer_range=0.02)
    language = shared | dict(intermediate_size=384, num_hidden_layers=3, max_position_embeddings=128)
    vision = shared | dict(hidden_size=128, intermediate_size=192, num_heads=4)
    sizes: dict[str, Any] = dict(language=language, vision=vision, pixels=(SIDE**2, SIDE**2), apart=0.0)
    return Path(make_tiny_vlm(folder, "qwen3_vl", make_tokenizer(), 64, seed=seed, **sizes))


def draw_video(generator: np.random.Generator) -> tuple[list[Image.Image], str]:
    """Draw the frames of a video, and return them with the right answer.

    A square goes from near a corner to near the next one. From each corner it may go two ways, and into each it may
    have come two ways, so that no single frame tells the answer.
    """
    way, offset = generator.choice(list(WAYS)), generator.integers(0, MARGIN + 1, 2)
    forward = np.array(WAYS[way])
    is_far = np.where(forward, forward < 0, generator.integers(0, 2, 2) > 0)  # what it goes along begins where it may
    start = np.where(is_far, SIDE - SQUARE - offset, offset)
    ground = tuple(generator.integers(0, 60, 3).tolist())
    fill = squares.COLOURS[generator.choice(list(squares.COLOURS))]
    frames = []
    for number in range(FRAMES):
        frame = Image.new("RGB", (SIDE, SIDE), ground)
        x, y = (start + number * STEP * forward).tolist()
        ImageDraw.Draw(frame).rectangle((x, y, x + SQUARE - 1, y + SQUARE - 1), fill=fill)
        frames.append(frame)
    return frames, str(way)


def make_data(folder: Path, counts: dict[str, int] = VIDEO_COUNTS) -> Path:
    """Write videos, and train.jsonl and heldout.jsonl that name them: ``counts`` has the rows of each file."""
    return write_rows(folder, {name: make_rows(folder, name, seed, counts[name]) for seed, name in enumerate(counts)})


def make_rows(folder: Path, name: str, seed: int, count: int) -> list[dict]:
    """Write ``count`` videos, and return the rows that name them."""
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    generator, rows = np.random.default_rng(seed), []
    for number in range(count):
        (first, *others), answer = draw_video(generator)
        path = f"videos/{name}_{number:04d}.webp"
        first.save(folder / path, save_all=True, append_images=others, duration=MILLISECONDS, lossless=True, method=0)
        rows.append({"prompt": "<bos> <video> ?", "videos": [path], "answer": answer})
    return rows
