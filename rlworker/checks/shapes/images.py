"""Images in shapes: patches have no numbers; grids of patches and places of image tokens do, and stay on the host."""

import math
import sys
from collections.abc import Sequence
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.images.columns import make_image_columns
from engines.megatron.layout import Layout
from engines.models.vision.vision_spec import VisionSpec
from hardware.shapes.device import ShapeMode

_SAMPLED = 8
"""At least one token of so many is sampled; all others are of an image, but for its two marks and a token of text."""


def find_grid(vision: VisionSpec, length: int) -> tuple[int, int, int]:
    """Find the grid of patches of the largest image that leaves a part of ``length`` tokens to be sampled.

    Raises:
        ValueError: the sequences have no room for an image.
    """
    most = length - length // _SAMPLED - 3
    if most < 1:
        raise ValueError(
            f"plan: --run-shapes has sequences of {length} tokens, expected at least 4 for an image; raise "
            "--data.max-prompt-tokens"
        )
    rows = math.isqrt(most)
    return 1, rows * vision.merge, most // rows * vision.merge


def make_image_batch(vision: VisionSpec, length: int, rows: int) -> TrainBatch:
    """Make ``rows`` sequences of ``length`` tokens with an image each; no two have the same."""
    grid = find_grid(vision, length)
    shown = [Image(str(number), str(number), (0, 0), grid, f"sequence {number}") for number in range(rows)]
    text = next(token for token in count() if token not in vision.banned_tokens)
    image = [vision.start_token, *[vision.image_token] * shown[0].tokens(vision.merge), vision.end_token]
    prompt = [text, *image]
    sequences = [prompt + [text] * (length - len(prompt))] * rows
    columns = make_image_columns(sequences, [(each,) for each in shown], vision)
    return TrainBatch.from_ids(sequences, [len(prompt)] * rows, **columns)


def _move_results(module: ModuleType, name: str, mode: ShapeMode) -> None:
    """Replace a module's function by one whose tensors are on the device in shapes."""
    function = getattr(module, name)
    setattr(
        module,
        name,
        lambda *args, **kwargs: tree_map_only(Tensor, lambda each: each.to(mode.device), function(*args, **kwargs)),
    )


def replace_images(vision: VisionSpec, mode: ShapeMode, embedding: ModuleType) -> None:
    """Replace image files by patches without numbers, and keep grids and places of image tokens on the host.

    Args:
        embedding: the module ``engines.megatron.vision.embedding``, which imports Megatron.
    """
    module: Any = embedding
    layouts: Any = Layout
    add_tower, copy, find, build = module.add_tower, module.to_device, module.Vision._places, Layout.build
    on_host: dict[int, tuple[Layout, Layout]] = {}  # each layout, which keeps its id alive, and the same on the host

    def make_patches(images: Sequence[Image]) -> Tensor:
        with mode.on_host:
            return torch.empty(sum(image.patches for image in images), vision.patch_size)

    def build_twice(*sizes: Any, **settings: Any) -> Layout:
        layout = build(*sizes, **settings)
        on_host[id(layout)] = layout, build(*sizes, **{key: settings[key] for key in settings if key != "device"})
        return layout

    def find_places(self: Any, rows: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        return tuple(each.to(mode.device) for each in find(self, rows, on_host[id(layout)][1]))

    def add_and_move_positions(model: Any, vision: VisionSpec) -> None:
        add_tower(model, vision)
        for part in model.vision.modules():
            if hasattr(part, "inv_freq"):  # its positions come from the grids
                part.register_forward_pre_hook(
                    lambda _, inputs: tree_map_only(Tensor, lambda each: each.to(mode.device), inputs)
                )
            if hasattr(part, "num_grid_per_side"):  # its learned positions too, by places in a table and their weights
                _move_results(sys.modules[type(part).__module__], "get_vision_interpolation_indices_and_weights", mode)

    module.add_tower, module.Vision._places, layouts.build = add_and_move_positions, find_places, build_twice
    module.to_device = lambda values, device: values if values.dtype == torch.long else copy(values, device)
    module.ImageProcessor = lambda *_: SimpleNamespace(patches=make_patches)
