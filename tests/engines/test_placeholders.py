"""Newlines around images: what the trainer has, what vLLM is sent, and what is refused before that."""

import pytest

from engines.batch.samples import Image
from engines.images.placeholders import check_margins, collapse_images, make_placeholders, read_newlines
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.models import make_tiny_model

TEXT = 40
IMAGES = tuple(Image("a.png", "0", (8, 8), (1, 4, 4), f"image {number}") for number in range(2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelSpec.from_folder(make_tiny_model(tmp_path_factory.mktemp("gemma3"), "gemma3"))


def spell(model: ModelSpec, *parts: str | int) -> list[int]:
    """Spell a prompt: "image" is its start, tokens and end; a number is the one token of so many newlines."""
    vision, newlines = model.require_vision(), read_newlines(model.folder)
    image = [vision.start_token, *[vision.image_token] * 4, vision.end_token]
    tokens = {"image": image, "start": [vision.start_token], "text": [TEXT]}
    return [token for part in parts for token in (tokens[part] if isinstance(part, str) else [newlines[part]])]


def test_a_margin_of_two_newlines_between_neighbours_is_one_token_of_four(model):
    assert make_placeholders(IMAGES[:1], model) == spell(model, 2, "image", 2)
    assert make_placeholders(IMAGES, model) == spell(model, 2, "image", 4, "image", 2)


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        (("text", 2, "image", 2, "text"), ("text", "start", "text")),
        (("text", 3, "image", 2, "text"), ("text", 1, "start", "text")),
        (("text", 4, "image", 4, "text"), ("text", 2, "start", 2, "text")),
        ((4, 2, "image", 2), (4, "start")),
        ((2, "image", 4, "image", 2, "text"), ("start", "start", "text")),
        ((2, "image", 2, "text", 2, "image", 2), ("start", "text", "start")),
    ],
)
def test_vllm_is_sent_the_newlines_of_the_text_alone(model, prompt, sent):
    ids = spell(model, *prompt)
    check_margins(ids, model.vision, read_newlines(model.folder), "row 1")
    assert collapse_images(ids, IMAGES, model) == spell(model, *sent)


@pytest.mark.parametrize(
    ("prompt", "side"),
    [
        (("text", 2, "image", 3, "text"), "after"),  # <image>\nquestion
        (("text", 2, "image", "text"), "after"),
        (("text", "image", 2), "before"),
        ((1, "image", 2), "before"),
    ],
)
def test_newlines_that_vllm_would_lose_are_refused(model, prompt, side):
    with pytest.raises(ValueError, match=f"row 7: the text {side} an image meets the 2 newlines .* {side} <image>"):
        check_margins(spell(model, *prompt), model.vision, read_newlines(model.folder), "row 7")
