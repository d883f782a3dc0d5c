"""Models of drawn weights in the shapes of released ones: speed and memory need no download.

    python -m recipes.common.shapes Qwen2.5-3B FOLDER --platform cuda             in bfloat16, drawn on the device
    python -m recipes.common.shapes Qwen2.5-3B FOLDER --platform cuda-emulated    a tiny stand-in of the same family

FOLDER has then ``model``, with a tokenizer of few words and the processor of images, and ``rows/train.jsonl``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hardware.platform import Platform
from hardware.platforms import DEFAULT_PLATFORM, PLATFORMS, get_platform
from recipes.common import addition, squares
from rlworker.checks.tiny.models import TinyVlm, make_tiny_text, make_tiny_vlm

VOCAB = 151936
"""Tokens of Qwen2.5 and Qwen3."""
SIDE = 448
"""Pixels of an image's side: 256 tokens of Qwen2.5-VL, 196 of Qwen3-VL."""
_TINY_VOCAB, _TINY_SIDE = 128, squares.SIDE
_ROWS = 256
_SHOTS = 25
"""Solved additions before a prompt of text, which has 256 tokens with them."""
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Of the tokenizer of characters."""
_QWEN_25_3B: dict[str, Any] = dict(
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
)
_QWEN_25_TOWER: dict[str, Any] = dict(
    depth=32,
    hidden_size=1280,
    intermediate_size=3420,
    num_heads=16,
    window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
    initializer_range=0.02,
)
_QWEN_3_4B: dict[str, Any] = dict(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
)
_QWEN_3_TOWER: dict[str, Any] = dict(
    depth=24,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=16,
    patch_size=16,
    num_position_embeddings=2304,
    deepstack_visual_indexes=[5, 11, 17],
    initializer_range=0.02,
)


_ON_HOST = ("--actor.optimizer.offload-fraction", "0.25")


def _turn(theta: float, sections: list[int], **others: bool) -> dict[str, Any]:
    """Make the rotary settings of a language model that sees images."""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    return {"rope_parameters": rope | others}


@dataclass(frozen=True)
class Shape:
    """The sizes of a released model.

    Attributes:
        family: HuggingFace model_type. language, vision: settings in config.json of its towers; without ``vision`` it
            sees no images. options: those of a run on one device of 80 GB, beside others' own.
    """

    family: Literal["qwen2"] | TinyVlm
    language: dict[str, Any]
    vision: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()


SHAPES = {
    "Qwen2.5-3B": Shape("qwen2", _QWEN_25_3B | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen2.5-VL-3B": Shape("qwen2_5_vl", _QWEN_25_3B | _turn(1e6, [16, 24, 24]), _QWEN_25_TOWER),
    "Qwen3-VL-4B": Shape(
        "qwen3_vl", _QWEN_3_4B | _turn(5e6, [24, 20, 20], mrope_interleaved=True), _QWEN_3_TOWER, _ON_HOST
    ),
}
"""Released models, by their names, whose steps a card's first day measures; their heads are tied."""


@contextmanager
def _drawing_on(platform: Platform) -> Iterator[None]:
    """Make tensors in bfloat16 on a platform's first device in this context."""
    os.environ.update(platform.get_train_env())
    import torch

    device = platform.init_process(0)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make_shape(name: str, folder: Path, platform: Platform) -> Path:
    """Save a model of drawn weights and rows for it; returns the folder that has both.

    Args:
        name: one of ``SHAPES``.
        platform: whose device draws the weights; one without devices gets a stand-in of the family in float32, with few
            parameters and short prompts.
    """
    shape, model, tiny = SHAPES[name], folder / "model", platform.visible_devices is None
    vocab = _TINY_VOCAB if tiny else VOCAB
    with nullcontext() if tiny else _drawing_on(platform):
        if shape.vision:
            side = _TINY_SIDE if tiny else SIDE
            make_tiny_vlm(
                model,
                shape.family,
                squares.make_tokenizer(),
                vocab,
                language=None if tiny else shape.language,
                vision=None if tiny else shape.vision,
                pixels=(side**2, side**2),
                apart=0.0,
            )
        else:
            make_tiny_text(model, shape.family, vocab, **_ENDS, **({} if tiny else shape.language))
            addition.make_tokenizer().save_pretrained(model)
    if shape.vision:
        squares.make_data(folder / "rows", {"train": _ROWS})
    else:
        addition.write_rows(folder / "rows", {"train": list(_make_rows(0 if tiny else _SHOTS))})
    return folder


def _make_rows(shots: int) -> Iterator[dict]:
    """Make additions, each after some that are solved."""
    for number in range(_ROWS):
        a, b = divmod(37 * number, 100)
        solved = "".join(f"{a:02d}+{other:02d}={a + other:03d} " for other in range(shots))
        yield {"prompt": f"{solved}{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES, help="the model whose shape is taken")
    parser.add_argument("folder", type=Path, help="for the model and its rows")
    parser.add_argument(
        "--platform", choices=PLATFORMS, default=DEFAULT_PLATFORM, help="whose device draws the weights"
    )
    options = parser.parse_args()
    make_shape(options.name, options.folder, get_platform(options.platform))


if __name__ == "__main__":
    main()
