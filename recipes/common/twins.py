"""A tiny Gemma 3 reads from an image of four cells, two of which are alike, which of the twins comes first.

Its tower sees one cell at a time, so that cells are compared in the language model alone, where each sees the others
both ways.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from recipes.common.addition import SPECIAL
from rlworker.checks.tiny_models import IMAGE_TOKENS, make_tiny_vlm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COLOURS = np.array(list(product((0, 255), repeat=3)), dtype=np.uint8)
"""The corners of the cube of colours."""
CELLS, CELL = 4, 4
"""Cells of an image, two by two, and the pixels of a cell's side."""
WORDS = ("?", *map(str, range(1, CELLS)))
IMAGE_COUNTS = {"train": 4096, "heldout": 512}


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
    return Path(make_tiny_vlm(folder, "gemma3", make_tokenizer(), 32, seed=seed, **sizes))


def draw_image(generator: np.random.Generator) -> tuple[Image.Image, str]:
    """Draw four cells, and return them with the number of the first twin, from 1, row by row."""
    colours = generator.permutation(len(COLOURS))[:CELLS]
    first, second = sorted(generator.choice(CELLS, 2, replace=False))
    colours[second] = colours[first]
    cells = COLOURS[colours].reshape(2, 2, 3)
    return Image.fromarray(cells.repeat(CELL, 0).repeat(CELL, 1)), str(first + 1)


def make_data(folder: Path, counts: dict[str, int] = IMAGE_COUNTS) -> Path:
    """Write images, and train.jsonl and heldout.jsonl that name them: ``counts`` has the rows of each file."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(counts.items()):
        generator, rows = np.random.default_rng(seed), []
        for number in range(count):
            image, answer = draw_image(generator)
            path = f"images/{name}_{number:04d}.png"
            image.save(folder / path)
            rows.append({"prompt": "<bos> <image> ?", "images": [path], "answer": answer})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
