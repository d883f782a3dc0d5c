"""A tiny Qwen2.5-VL learns from these images to name and count squares of one colour on a dark ground."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from recipes.common.addition import SPECIAL, write_rows
from rlworker.checks.tiny.models import IMAGE_TOKENS, make_tiny_vlm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# All are bright in every channel, so that what is learned of counting one colour holds for the others.
COLOURS = {"red": (235, 90, 90), "green": (90, 220, 90), "blue": (100, 130, 250), "yellow": (240, 225, 90)}
SIDE, CELL, MAX_COUNT = 56, 14, 4
WORDS = ("?", *COLOURS, *map(str, range(1, MAX_COUNT + 1)))
IMAGE_COUNTS = {"train": 4096, "heldout": 512}
FRAMES, MILLISECONDS = 4, 250
"""Frames of a video, and how long each is shown."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*SPECIAL, *IMAGE_TOKENS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(IMAGE_TOKENS), **names)


def make_model(folder: Path, seed: int) -> Path:
    """Save a Qwen2.5-VL of 2.4 million random parameters, with its tokenizer and its image processor."""
    return _make_model(folder, seed, "qwen2_5_vl", intermediate_size=384, num_hidden_layers=3)


def make_expert_model(folder: Path, seed: int) -> Path:
    """Save a Qwen3.5 with experts, of random parameters, with its tokenizer and its image processor."""
    experts = dict(moe_intermediate_size=128, shared_expert_intermediate_size=128)
    return _make_model(folder, seed, "qwen3_5_moe", **experts)


def _make_model(folder: Path, seed: int, family: str, **language: int) -> Path:
    shared = dict(initializer_range=0.02)
    vision = shared | dict(hidden_size=128, intermediate_size=192, num_heads=4)
    text = shared | dict(max_position_embeddings=128) | language
    sizes: dict[str, Any] = dict(language=text, vision=vision, pixels=(SIDE**2, SIDE**2), apart=0.0)
    return Path(make_tiny_vlm(folder, family, make_tokenizer(), 64, seed=seed, **sizes))


def draw_image(generator: np.random.Generator) -> tuple[Image.Image, str]:
    """Draw an image, and return it with its right answer, such as ``red 3``."""
    colour, count = generator.choice(list(COLOURS)), int(generator.integers(1, MAX_COUNT + 1))
    image = Image.new("RGB", (SIDE, SIDE), tuple(generator.integers(0, 60, 3).tolist()))
    pen, cells = ImageDraw.Draw(image), SIDE // CELL
    for place in generator.choice(cells**2, count, replace=False):
        x, y = (int(v) * CELL + int(generator.integers(0, 4)) for v in (place % cells, place // cells))
        pen.rectangle((x, y, x + 8, y + 8), fill=COLOURS[colour])
    return image, f"{colour} {count}"


def make_data(folder: Path, counts: dict[str, int] = IMAGE_COUNTS) -> Path:
    """Write images, and train.jsonl and heldout.jsonl that name them: ``counts`` has the rows of each file."""
    return write_rows(folder, {name: make_rows(folder, name, seed, counts[name]) for seed, name in enumerate(counts)})


def make_rows(folder: Path, name: str, seed: int, count: int) -> list[dict]:
    """Write ``count`` images, and return the rows that name them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator, rows = np.random.default_rng(seed), []
    for number in range(count):
        image, answer = draw_image(generator)
        path = f"images/{name}_{number:04d}.png"
        image.save(folder / path)
        rows.append({"prompt": "<bos> <image> ?", "images": [path], "answer": answer})
    return rows


def make_video_rows(folder: Path, name: str, seed: int, count: int) -> list[dict]:
    """Write ``count`` videos of ``FRAMES`` images each, and return the rows that name them, right by their last."""
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    generator, rows = np.random.default_rng(seed), []
    for number in range(count):
        (first, _), *others = (draw_image(generator) for _ in range(FRAMES))
        path, frames = f"videos/{name}_{number:04d}.webp", [image for image, _ in others]
        first.save(folder / path, save_all=True, append_images=frames, duration=MILLISECONDS, lossless=True, method=0)
        rows.append({"prompt": "<bos> <video> ?", "videos": [path], "answer": others[-1][1]})
    return rows
