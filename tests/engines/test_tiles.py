"""Images that are cut into tiles: as many as transformers' own processor makes, and the same ids and pixels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import make_vlm

from engines.images.placeholders import collapse_images, make_placeholders
from engines.images.processor import ImageProcessor
from engines.models.spec import ModelSpec

SIZES = ((56, 56), (60, 50), (112, 56), (56, 112), (28, 84), (168, 56), (301, 240), (57, 300))
"""Width and height of images of tiles of 56: square, of two side by side or above one another, of three."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelSpec:
    return ModelSpec.from_folder(make_vlm(tmp_path_factory.mktemp("internvl"), "internvl"))


@pytest.fixture(scope="module")
def processor(model) -> ImageProcessor:
    return ImageProcessor(model.folder, model.require_vision())


@pytest.fixture(scope="module")
def images(processor, tmp_path_factory) -> list:
    generator, folder, opened = np.random.default_rng(0), tmp_path_factory.mktemp("images"), []
    for width, height in SIZES:
        path = Path(folder, f"{width}x{height}.png")
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        opened.append(processor.open(path, path.stem))
    return opened


def test_tiles_ids_and_pixels_are_those_of_transformers(model, processor, images):
    """One tile, or several and the whole image made small after them: of all images at once, and in one run each."""
    from transformers import AutoProcessor

    theirs = AutoProcessor.from_pretrained(model.folder)
    pictures = [Image.open(image.path) for image in images]
    found = theirs(images=pictures, text=theirs.image_token * len(images), return_tensors="pt")
    assert [image.grid for image in images] == [(n, 4, 4) for n in (1, 1, 3, 3, 4, 4, 1, 4)]
    ours = [token for image in images for token in make_placeholders([image], model)]
    assert ours == found["input_ids"][0].tolist()
    assert torch.equal(processor.patches(images), found["pixel_values"])
    assert len(found["pixel_values"]) == sum(image.grid[0] for image in images)


def test_an_image_of_another_count_of_tiles_is_named(processor, images):
    with pytest.raises(ValueError, match=r"112x56: the processor cut .* into \[3, 4, 4\] patches, expected \[2, 4,"):
        processor.patches([images[0], replace(images[2], grid=(2, 4, 4))])


def test_what_marks_an_image_is_left_to_vllm(model, images):
    vision = model.require_vision()
    start, image, end = vision.start_token, vision.image_token, vision.end_token
    ids = [5, *make_placeholders(images[1:3], model), 6, start, 7, *make_placeholders(images[4:5], model), end]
    assert ids.count(image) == (1 + 3 + 4) * 4
    assert collapse_images(ids, [*images[1:3], images[4]], model) == [5, image, image, 6, start, 7, image, end]
