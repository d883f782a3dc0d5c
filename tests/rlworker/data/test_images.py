"""Rows with images: what becomes of them, and every way in which one can be broken."""

import base64
import io
import json
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.environments.rows import read_shown, write
from support.rollout_workers import make_completions

from engines.config import MegatronConfig
from engines.images.decoding import decode
from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import IMAGE_TOKENS, make_tiny_vlm
from rlworker.config.beside_actor import check_same_image_processing
from rlworker.config.model_checks import check_trainable
from rlworker.config.sections import DataConfig
from rlworker.config.sft import SftConfig
from rlworker.data.examples import read_examples
from rlworker.data.images import build_image_reader
from rlworker.data.rows import load_tokenizer, read_rows
from rlworker.rollouts.trajectory import to_batch
from rlworker.tracking.log import read_metrics
from rlworker.tracking.report.samples import show_sample
from rlworker.trainers.rejected_step import save_rejected

DATA = DataConfig(max_prompt_tokens=64)
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    return ModelSpec.from_folder(make_tiny_vlm(folder, "qwen2_5_vl", make_tokenizer(CHAT, IMAGE_TOKENS), 128))


@pytest.fixture
def read(model, tmp_path):
    """``read(*rows)`` of a JSONL file beside ``a.png`` (84 x 56) and ``b.png`` (28 x 28)."""
    save_images(tmp_path)
    return partial(read_shown, model, DATA, folder=tmp_path)


def save_images(folder) -> None:
    for seed, (name, sides) in enumerate({"a": (56, 84, 3), "b": (28, 28, 3)}.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, sides, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")


def test_images_take_their_places(read, model, tmp_path):
    vision = model.vision
    text = {"prompt": "<image>x<image>", "images": ["a.png", str(tmp_path / "b.png")], "answer": "y"}
    parts = [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}]
    chat = text | {"prompt": [{"role": "u", "content": parts}]}
    plain, spoken, none = read(text, chat, {"prompt": "x", "answer": "y"})
    (x,) = none.prompt_ids
    start, image, end = vision.start_token, vision.image_token, vision.end_token
    assert plain.prompt_ids == (start, *[image] * 6, end, x, start, image, end)
    assert [i.grid for i in plain.images] == [(1, 4, 6), (1, 2, 2)] and not none.images
    assert [(i.size, i.place[-7:]) for i in plain.images] == [((84, 56), "image 0"), ((28, 28), "image 1")]
    assert spoken.prompt_ids[2:-3] == plain.prompt_ids
    assert [i.digest for i in spoken.images] == [i.digest for i in plain.images]


def test_an_answer_behind_a_shorter_prompt_keeps_the_images(model, tmp_path):
    """The template opens an answer in another way than it writes one: ``!`` stands in a prompt alone."""
    save_images(tmp_path)
    tokenizer = load_tokenizer(model.folder)
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    tokenizer.chat_template = turns + "{{ 'assistant:!' if add_generation_prompt }}"
    row = {"prompt": [{"role": "user", "content": "<image>x"}], "images": ["a.png"], "answer": "y"}
    reader = build_image_reader(model, str(tmp_path / "run"), 64)
    ((example,), _) = read_examples(write(tmp_path, row), tokenizer, SftConfig(data=DATA), model, reader)
    context, said = example.ids[: example.prompt_length], example.ids[example.prompt_length :]
    assert tokenizer.decode(context).endswith("x;assistant:") and tokenizer.decode(said) == "y<eos>"
    assert context.count(model.vision.image_token) == 6 and len(example.images) == 1


def test_images_as_bytes_are_kept_once_by_what_they_are(read, model, tmp_path):
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    save_images(tmp_path)
    features = Features({"prompt": Value("string"), "answer": Value("string"), "images": [ImageFeature()]})
    paths = [str(tmp_path / name) for name in ("a.png", "a.png", "b.png")]
    rows = [{"prompt": "<image>", "answer": "y", "images": [path]} for path in paths]
    data = Dataset.from_list(rows, features=features).map(lambda row: row)
    data.cast_column("images", [ImageFeature(decode=False)]).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.png").rename(tmp_path / "moved.png")
    reader = build_image_reader(model, str(tmp_path / "run"), 64)
    found = read_rows(str(tmp_path / "saved"), load_tokenizer(model.folder), DATA, reader).rows
    kept = sorted((tmp_path / "run" / "images").iterdir())
    assert [row.source["images"] for row in found] == [[row.images[0].path] for row in found], "no bytes are held"
    assert len(kept) == 2 and {row.images[0].path for row in found} == set(map(str, kept))
    (plain,) = read({"prompt": "<image>", "images": ["b.png"], "answer": "y"})
    assert found[2].images[0].digest == plain.images[0].digest
    assert len(reader.processor.patches(found[0].images)) == 24

    with pytest.raises(ValueError, match='row 0: field "images", image 0: its bytes cannot be read as an image'):
        reader.read_row({"images": [{"bytes": b"no image"}]}, "row 0", DATA, tmp_path)
    assert len(list((tmp_path / "run" / "images").iterdir())) == 2


def test_two_processes_may_store_one_image_at_once(model, tmp_path, monkeypatch):
    """The other stores it between this one's writing and naming of the file."""
    save_images(tmp_path)
    data, write_bytes = (tmp_path / "a.png").read_bytes(), Path.write_bytes
    readers = [build_image_reader(model, str(tmp_path / "run"), 64) for _ in range(2)]

    def interrupt(path, content):
        write_bytes(path, content)
        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        readers[1].read_images([{"bytes": data}], "other", tmp_path)

    monkeypatch.setattr(Path, "write_bytes", interrupt)
    (image,) = readers[0].read_images([{"bytes": data}], "row 0", tmp_path)
    (kept,) = (tmp_path / "run" / "images").iterdir()
    assert image.path == str(kept) and kept.read_bytes() == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": ["none.png"]}, r'rows.jsonl, line 2: field "images", image 0: .*none.png.* cannot be read: No'),
        ({"images": ["rows.jsonl"]}, r"line 2: .*image 0: .*rows.jsonl.* cannot be read as an image"),
        ({"images": ["half.png"]}, r"line 2: .*image 0: .*half.png.* cannot be decoded: .*; replace it"),
        ({"images": ["half.jpg"]}, r"line 2: .*image 0: .*half.jpg.* cannot be decoded: .*; replace it"),
        ({"images": ["flipped.png"]}, r"line 2: .*image 0: .*flipped.png.* cannot be decoded: broken PNG file .*IDAT"),
        ({"images": ["torn.avif"]}, r"line 2: .*image 0: .*torn.avif.* cannot be decoded: Failed to decode"),
        ({"images": ["wordy.png"]}, r"line 2: .*image 0: .*wordy.png.* cannot be read as an image: .*MAX_TEXT_CHUNK"),
        ({"images": ["data:image/png;base64," + "A" * 9000]}, r"image 0 is a data: URI, .*A{10}' and 9022 characters"),
        ({"images": ["deep.png"]}, r"line 2: .*image 0: .*deep.png.* has more than 8 bits of grey \(I;16\)"),
        ({"images": [7]}, r'line 2: .*image 0 must be a path, \{"bytes": ..., "path": ...\} or .*, got int'),
        (
            {"images": [{"path": "a.png", "max_pixels": 99}]},
            r"line 2: .*image 0 has 'max_pixels', which images here are",
        ),
        ({"images": []}, r'line 2: the prompt has places for 1 images, the row has 0 in its field "images"; write'),
        ({"images": ["a.png", "b.png"]}, r"line 2: the prompt has places for 1 images, the row has 2"),
        ({"prompt": "<image><|image_pad|>"}, r"line 2: the prompt has places for 2 images, the row has 1"),
        ({"prompt": "<image><|video_pad|>"}, r"line 2: the prompt has the token of a video"),
        ({"images": ["thin.png"]}, r"line 2: .*thin.png.* is 1000 x 2 pixels: absolute aspect ratio"),
        (
            {"images": ["wide.png"]},
            r"line 2: .*wide.png.*, 1400 x 1120 pixels, and .* before it take 7.* expected at mo",
        ),
        ({"prompt": "<image>" * 20, "images": ["a.png"] * 20}, r"line 2: .*image 1[0-9]: .* images before it take"),
    ],
)
def test_a_broken_image_is_named(read, tmp_path, change, message):
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[:3000])
    (tmp_path / "flipped.png").write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    with Image.open(tmp_path / "a.png") as image:
        image.save(tmp_path / "torn.avif")
    head, box, data = (tmp_path / "torn.avif").read_bytes().partition(b"mdat")
    (tmp_path / "torn.avif").write_bytes(head + box + b"\xff" * 32 + data[32:])
    text = PngInfo()
    text.add_text("notes", "x" * 2**21, zip=True)
    Image.new("RGB", (56, 56)).save(tmp_path / "wordy.png", pnginfo=text)
    Image.new("RGB", (1000, 2)).save(tmp_path / "thin.png")
    Image.new("RGB", (1400, 1120)).save(tmp_path / "wide.png")
    Image.new("RGB", (300, 300)).effect_spread(50).save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:1500])
    Image.fromarray(np.full((56, 56), 4000, dtype=np.uint16)).save(tmp_path / "deep.png")
    row = {"prompt": "<image>?", "images": ["a.png"], "answer": "y"}
    with pytest.raises(ValueError, match=message):
        read(row, row | change, limit_mb=4)


def test_verls_forms_of_an_image_are_read(read, tmp_path):
    """A dict with ``image``, with a file's address, and with null for what a table filled up."""
    forms = ["a.png", {"image": "a.png"}, {"image": f"file://{tmp_path}/a.png", "bytes": None}]
    forms += [{"type": "image", "image": "a.png"}, {"path": "a.png", "image": None}]
    rows = read(*({"prompt": "<image>", "images": [form], "answer": "y"} for form in forms))
    assert len({row.images[0].digest for row in rows}) == 1 and len({row.prompt_ids for row in rows}) == 1


def write_bad(folder, count: int, good: int = 2) -> str:
    rows = [{"prompt": "<image>", "images": [f"none{number}.png"], "answer": "y"} for number in range(count)]
    rows[1:1] = [{"prompt": "<image>", "images": ["a.png"], "answer": "y"}] * good
    return write(folder, *rows)


def read_from(path, model, folder, data):
    return read_rows(path, load_tokenizer(model.folder), data, build_image_reader(model, str(folder / "run"), 64))


def test_bad_images_are_listed_together_and_can_be_left_out(model, tmp_path, caplog):
    """The first ten of them, by one start; left out they are counted, and are never all of the rows."""
    save_images(tmp_path)
    skip = replace(DATA, skip_bad_images=True)
    with pytest.raises(
        ValueError, match=r"12 of 14 rows have bad images; correct them, or set --data.skip-bad"
    ) as error:
        read_from(write_bad(tmp_path, 12), model, tmp_path, DATA)
    said = str(error.value).splitlines()
    assert len(said) == 12 and said[-1] == "  and 2 more" and "none9.png' cannot be read" in said[10]
    rows = read_from(write_bad(tmp_path, 12), model, tmp_path, skip)
    assert (len(rows.rows), rows.skipped) == (2, 12)
    assert "12 of 14 rows are left out for bad images:" in caplog.text and "none0.png" in caplog.text
    with pytest.raises(ValueError, match=r"12 of 12 rows have bad images; correct them:"):
        read_from(write_bad(tmp_path, 12, good=0), model, tmp_path, skip)
    with pytest.raises(ValueError, match=r"none0.png' cannot be read: .*; or leave the row out by --data.skip-bad-im"):
        read_from(write_bad(tmp_path, 1), model, tmp_path, DATA)


def test_conversations_with_bad_images_are_left_out_too(model, tmp_path, caplog):
    save_images(tmp_path)
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "y"}]
    path = write(tmp_path, *({"messages": turns, "images": [name]} for name in ("a.png", "none.png", "none2.png")))
    reader = build_image_reader(model, str(tmp_path / "run"), 64)
    tokenizer = load_tokenizer(model.folder)
    tokenizer.chat_template = TURNS
    read = partial(read_examples, path, tokenizer, model=model, image_reader=reader)
    examples, skipped = read(SftConfig(data=replace(DATA, skip_bad_images=True)))
    assert (len(examples), skipped) == (1, 2) and "2 of 3 rows are left out for bad images" in caplog.text
    with pytest.raises(ValueError, match="2 of 3 rows have bad images"):
        read(SftConfig(data=DATA))


def test_a_model_without_vision_refuses_images(tmp_path):
    path = write(tmp_path, {"prompt": "<image>", "images": ["a.png"], "answer": "y"})
    with pytest.raises(ValueError, match='line 1: field "images", "videos" or the prompt has images or videos,'):
        read_rows(path, make_tokenizer(), DATA)


def test_an_answer_may_not_have_image_tokens(model, tmp_path):
    path = write(tmp_path, {"prompt": "x", "answer": "<|image_pad|>"})
    config = SftConfig(model=model.folder, data=DATA, max_answer_tokens=8)
    with pytest.raises(ValueError, match=r"the answer '<\|image_pad\|>' has tokens \[\d+\], which stand for images"):
        read_examples(path, load_tokenizer(model.folder), config, model)


TURNS = "{% for m in messages %}{{ ('red ' if m.role == 'assistant' else '? ') + m.content + ' ' + eos_token + ' ' }}"
TURNS += "{% endfor %}{{ 'red ' if add_generation_prompt }}"


def test_images_take_their_places_in_a_conversation(read, model, tmp_path):
    """Each stands where the same messages have it as a prompt; what is said between them is learned."""
    tokenizer = load_tokenizer(model.folder)
    tokenizer.chat_template = TURNS
    asks = [{"role": "user", "content": text} for text in ("<image> ?", [{"type": "image"}, {"type": "image"}], "?")]
    says = [{"role": "assistant", "content": text} for text in ("blue 2", "red 1", "red")]
    messages = [message for pair in zip(asks, says, strict=True) for message in pair]
    config = SftConfig(model=model.folder, data=replace(DATA, max_prompt_tokens=99))
    reader = build_image_reader(model, str(tmp_path / "run"), 64)

    def learn(row: dict) -> list:
        return read_examples(write(tmp_path, row), tokenizer, config, model, reader)[0]

    row = {"messages": messages, "images": ["a.png", "b.png", "b.png"]}
    (example,) = learn(row)
    (prompt,) = learn({"prompt": messages[:-1], "answer": "red", "images": row["images"]})
    assert example.ids[: len(prompt.ids)] == prompt.ids and example.images == prompt.images
    assert [image.grid for image in example.images] == [(1, 4, 6), (1, 2, 2), (1, 2, 2)]
    said = [tokenizer.decode(example.ids[first:last]) for first, last in example.turns]
    assert said == [f"{say['content']} {tokenizer.eos_token}" for say in says]
    for broken, message in (
        (row | {"images": row["images"][:2]}, "has places for 3 images, the row has 2"),
        (row | {"images": [*row["images"], "a.png"]}, "has places for 3 images, the row has 4"),
        (
            row | {"messages": [asks[0], says[0] | {"content": "<image>"}]},
            "'<image>' has an image, which only",
        ),
        (row | {"messages": [asks[0], says[0] | {"content": "<|image_pad|>"}], "images": ["a.png"]}, "assistant says"),
    ):
        with pytest.raises(ValueError, match=message):
            learn(broken)


def test_jpeg_and_grey_images_are_seen_in_colour(read, model, tmp_path):
    with Image.open(tmp_path / "a.png") as image:
        image.convert("L").save(tmp_path / "grey.png")
        image.save(tmp_path / "a.jpg")
    rows = read(*({"prompt": "<image>", "images": [name], "answer": "y"} for name in ("grey.png", "a.jpg")))
    for row in rows:
        patches = build_image_reader(model, str(tmp_path), 64).processor.patches(row.images)
        assert patches.shape == (24, 3 * 2 * 14 * 14)


def test_images_are_seen_as_a_viewer_shows_them(read, tmp_path):
    """Black lines on a transparent ground, and a camera that lay on its side; two kinds of transparency."""
    lines = Image.new("RGBA", (56, 28))
    lines.paste((0, 0, 0, 255), (0, 0, 28, 28))
    lines.save(tmp_path / "lines.png")
    lines.convert("LA").save(tmp_path / "grey.png")
    held = Image.new("RGB", (84, 56))
    held.paste((255, 0, 0), (0, 0, 84, 28))  # above, which is on the right once it is turned
    turned = Image.Exif()
    turned[0x0112] = 6
    held.save(tmp_path / "held.jpg", exif=turned, quality=100)
    rows = read(*({"prompt": "<image>", "images": [n], "answer": "y"} for n in ("lines.png", "grey.png", "held.jpg")))
    for row in rows[:2]:
        pixels = np.asarray(decode(row.images[0]))
        assert pixels[:, :28].max() == 0 and pixels[:, 28:].min() == 255
    shown = show_sample({"images": [rows[0].images[0].path]})["thumbnails"][0][1]
    in_report = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))))
    assert np.array_equal(in_report, np.asarray(decode(rows[0].images[0]))), "the report shows what the model sees"
    (image,) = rows[2].images
    assert image.size == (56, 84) and image.grid == (1, 6, 4)
    pixels = np.asarray(decode(image)).astype(int)
    assert pixels.shape == (84, 56, 3) and pixels[:, 30:, 0].min() > 200 and pixels[:, :26].max() < 50


def test_turned_images_have_the_size_that_they_are_shown_with(read, tmp_path):
    """Each kind of file and each number; numbers that mean nothing, and a number that is text, leave one upright."""
    names = {}
    for number, ending in product([1, 2, 3, 4, 5, 6, 7, 8, 9, 200], ["jpg", "png", "tif", "webp"]):
        exif = Image.Exif()
        exif[0x0112] = number
        name = f"{number}.{ending}"
        Image.new("RGB", (84, 56)).save(tmp_path / name, exif=exif)
        names[name] = (56, 84) if 5 <= number <= 8 else (84, 56)
    tag = struct.pack(">2sHIHHHI4sI", b"MM", 42, 8, 1, 0x0112, 2, 2, b"6", 0)  # of ASCII
    Image.new("RGB", (84, 56)).save(tmp_path / "text.jpg", exif=b"Exif\0\0" + tag)
    names["text.jpg"] = (84, 56)
    rows = read(*({"prompt": "<image>", "images": [name], "answer": "y"} for name in names))
    for row, (name, size) in zip(rows, names.items(), strict=True):
        (image,) = row.images
        assert image.size == decode(image).size == size, name


def test_images_under_another_name_are_not_passed_over(read):
    seen, text = {"prompt": "<image>", "images": ["a.png"], "answer": "y"}, {"prompt": "x", "answer": "y"}
    for field in ({"image": "a.png"}, {"photo": ["a.png"]}):
        with pytest.raises(ValueError, match=r'line 1: field "\w+" seems to have images, .*name the field with --data'):
            read(text | field)
        assert len(read(text | field, seen)) == 2, "where rows have theirs it may be anything"


def test_rows_of_one_image_have_it_read_once(model, tmp_path, monkeypatch):
    save_images(tmp_path)
    reader, read = build_image_reader(model, str(tmp_path / "run"), 64), []
    take = reader.processor.open
    monkeypatch.setattr(reader.processor, "open", lambda *args: (read.append(1), take(*args))[1])
    first, second = (reader.read_row({"images": ["a.png"]}, f"row {i}", DATA, tmp_path)[0] for i in range(2))
    assert len(read) == 1 and first.digest == second.digest
    assert (first.place, second.place) == ('row 0: field "images", image 0', 'row 1: field "images", image 0')


def test_models_of_one_run_see_alike(model, make_hf_model, tmp_path):
    from transformers import AutoImageProcessor

    check_same_image_processing(model, model)
    text = ModelSpec.from_folder(make_hf_model("qwen2", True))
    check_same_image_processing(text, text)
    with pytest.raises(ValueError, match="model: this model cannot see images and the actor can"):
        check_same_image_processing(text, model)
    with pytest.raises(ValueError, match="model: the actor cannot see images and this model can"):
        check_same_image_processing(model, text)
    with pytest.raises(ValueError, match=r"has image tokens .*, the actor .*; take two models of the same family"):
        check_same_image_processing(replace(model, vision=replace(model.vision, start_token=3)), model)
    shutil.copytree(model.folder, tmp_path / "other")
    settings = json.loads((tmp_path / "other" / "preprocessor_config.json").read_text())
    (tmp_path / "other" / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.4] * 3}))
    with pytest.raises(ValueError, match=r"the image processors in .* differ in image_mean, so that the two models"):
        check_same_image_processing(replace(model, folder=str(tmp_path / "other")), model)
    AutoImageProcessor.from_pretrained(model.folder).save_pretrained(tmp_path / "other")
    other = replace(model, folder=str(tmp_path / "other"))
    check_same_image_processing(other, model)  # the same settings, told in other words


@pytest.mark.parametrize("size", [{"max_pixels": 12544, "min_pixels": 3136}, {"shortest_edge": 3136}])
def test_a_processor_that_names_its_pixels_otherwise_is_refused_with_its_file(model, tmp_path, size):
    shutil.copytree(model.folder, tmp_path / "other")
    path = tmp_path / "other" / "preprocessor_config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if not name.endswith("_pixels")}
    path.write_text(json.dumps(settings | {"size": size}))
    with pytest.raises(
        ValueError, match=r"preprocessor_config.json in .*/other' has size .* name its min_pixels short"
    ):
        build_image_reader(ModelSpec.from_folder(tmp_path / "other"), str(tmp_path), 64)


def test_a_folder_without_an_image_processor_is_refused_before_anything_starts(model, tmp_path):
    shutil.copytree(model.folder, tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no preprocessor_config.json, which says how images are cut"):
        check_trainable(ModelSpec.from_folder(tmp_path / "other"), MegatronConfig(), "cpu")


def test_a_tokenizer_of_another_model_is_refused(model, tmp_path):
    path = write(tmp_path, {"prompt": "x", "answer": "y"})
    with pytest.raises(ValueError, match=r"model: the tokenizer calls tokens \[\d+, \d+, \d+\], which config.json"):
        read_rows(path, make_tokenizer(), DATA, build_image_reader(model, str(tmp_path), 64))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"video": "a.mp4"}, r'line 1: field "video" has videos, but .* from field "videos"; set'),
        (
            {"videos": ["a.mp4"]},
            r'line 1: field "videos" has videos, but this model .* videos here: transformers and vLLM disagree where',
        ),
        ({"prompt": [{"role": "u", "content": [{"type": "image", "image": "a.png"}]}]}, r"line 1: .* its part says \{"),
    ],
)
def test_what_the_engine_would_not_show_is_refused(read, row, message):
    with pytest.raises(ValueError, match=message):
        read({"prompt": "<image>", "images": ["a.png"], "answer": "y"} | row)


def test_a_refused_step_names_the_images(read, model, tmp_path):
    (row,) = read({"prompt": "<image>?", "images": ["a.png"], "answer": "y"})
    answer = make_completions(([5, 6], [-1.0, float("nan")], 1))
    batch = to_batch([row], answer, [1.0], model.vision)
    assert save_rejected(tmp_path / "step.jsonl", batch, {}, load_tokenizer(model.folder)) == 1
    (image,) = json.loads((tmp_path / "step.jsonl").read_text())["images"]
    assert image["grid"] == [1, 4, 6] and image["place"].endswith('line 1: field "images", image 0')


def test_logprob_differences_after_images_are_told_apart(read, model):
    from rlworker.trainers.agreement import compare_logprobs

    seen, text = read({"prompt": "<image>?", "images": ["a.png"], "answer": "y"}, {"prompt": "x", "answer": "y"})
    samples = make_completions(([5, 6], [-1.0, -1.0], 1), ([7], [-1.0], 1))
    batch = to_batch([seen, text], samples, [1.0, 0.0], model.vision)
    logprobs = torch.full((batch.num_tokens,), -1.0)
    logprobs[batch.mask] = torch.tensor([-1.5, -1.0, -3.0])
    found = compare_logprobs(batch, logprobs)
    assert (found["logprob_diff_mean"], found["logprob_diff_max"]) == (pytest.approx(2.5 / 3), 2.0)
    assert (found["logprob_diff_images_mean"], found["logprob_diff_images_max"]) == (0.25, 0.5)
    alone = compare_logprobs(to_batch([text], samples[1:], [0.0], model.vision), torch.zeros(1))
    assert set(alone) == {"logprob_diff_mean", "logprob_diff_max"}


@pytest.mark.large
def test_an_image_that_breaks_off_ends_the_run_by_its_name(model, tmp_path):
    """Its start and its end are whole; its pixels are asked for by vLLM in the first step."""
    save_images(tmp_path)
    with Image.open(tmp_path / "a.png") as image:
        image.save(tmp_path / "half.jpg")
    whole = (tmp_path / "half.jpg").read_bytes()
    table = whole.index(b"\xff\xc4")  # of Huffman codes: sixteen counts, which no code has so many of
    (tmp_path / "half.jpg").write_bytes(whole[: table + 5] + b"\xff" * 16 + whole[table + 21 :])
    rows = [{"prompt": "<image>?", "images": [name], "answer": "y"} for name in ("b.png", "half.jpg")]
    write(tmp_path, *rows)
    sizes = {"rollout.max-new-tokens": 4, "rollout.max-model-len": 64, "data.max-prompt-tokens": 32, "steps": 2}
    sizes |= {"prompts-per-step": 2, "samples-per-prompt": 2, "rollout.kv-cache-mb": 64, "run-dir": tmp_path / "run"}
    options = {"model": model.folder, "data.train": tmp_path / "rows.jsonl"} | sizes
    command = [sys.executable, "-W", "ignore", "-m", "recipes.grpo"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: step 1, phase rollout: " in done.stderr
    assert re.search(r'line 2: field "images", image 0: .*half.jpg.* cannot be decoded', done.stderr)
    assert (tmp_path / "run" / "report.html").is_file() and len(read_metrics(tmp_path / "run")) == 1
