"""A tiny Gemma 3 reads from an image of four cells, two of which are alike, which of the twins comes first.

Its tower sees one cell at a time, so that cells are compared in the language model alone, where each sees the others
both ways.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from recipes.common import squares
from rlworker.checks.tiny_models import make_tiny_vlm

COLOURS = np.array(list(product((0, 255), repeat=3)), dtype=np.uint8)
"""The corners of the cube of colours."""
CELLS, CELL = 4, 4
"""Cells of an image, two by two, and the pixels of a cell's side."""
WORDS = ("?", *map(str, range(1, CELLS)))


def make_model(folder: Path, seed: int) -> Path:
    """Save a Gemma 3 of 100 thousand random parameters, with its tokenizer and its image processor."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    language: dict[str, Any] = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        query_pre_attn_scalar=32,
        max_position_embeddings=64,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
        initializer_range=0.05,
    )
    vision = dict(hidden_size=64, num_hidden_layers=0, image_size=2 * CELL, patch_size=CELL)
    sizes: dict[str, Any] = dict(language=language, vision=vision, apart=0.0)
    return Path(make_tiny_vlm(folder, "gemma3", squares.make_tokenizer(WORDS), 32, seed=seed, **sizes))


def draw_image(generator: np.random.Generator) -> tuple[Image.Image, str]:
    """Draw four cells, and return them with the number of the first twin, from 1, row by row."""
    colours = generator.permutation(len(COLOURS))[:CELLS]
    first, second = sorted(generator.choice(CELLS, 2, replace=False))
    colours[second] = colours[first]
    cells = COLOURS[colours].reshape(2, 2, 3)
    return Image.fromarray(cells.repeat(CELL, 0).repeat(CELL, 1)), str(first + 1)


def make_data(folder: Path, counts: dict[str, int] = squares.IMAGE_COUNTS) -> Path:
    """Write images, and train.jsonl and heldout.jsonl that name them: ``counts`` has the rows of each file."""
    return squares.make_data(folder, counts, draw_image)
