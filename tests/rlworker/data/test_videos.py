"""Rows with videos, against transformers' own processor; and every way in which one can be broken."""

import json
import shutil
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from support.environments.rows import read_shown

from engines.images.columns import find_image_blocks
from engines.images.frames import decode_video
from engines.images.placeholders import collapse_images, make_placeholders
from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import IMAGE_TOKENS, make_tiny_vlm
from rlworker.config.sections import DataConfig
from rlworker.data.images import build_image_reader
from rlworker.data.rows import load_tokenizer

DATA = DataConfig(max_prompt_tokens=200)
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
FRAMES = np.random.default_rng(0).integers(0, 256, (12, 56, 84, 3), dtype=np.uint8)
ROW = {"prompt": "<video>?", "answer": "y"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    return ModelSpec.from_folder(make_tiny_vlm(folder, "qwen3_vl", make_tokenizer(CHAT, IMAGE_TOKENS), 128))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with what ``save`` saves."""
    folder = tmp_path_factory.mktemp("kept")
    save(folder)
    return folder


@pytest.fixture
def read(model, kept):
    """``read(*rows)`` of a JSONL file in ``kept``, or in another folder."""
    return partial(read_shown, model, DATA, folder=kept)


def save(folder) -> None:
    """Save ``FRAMES`` at four a second as ``a.webp``, ``a.png``, ``a.avi`` and the folder ``frames``; and an image,
    ``b.png``."""
    first, *others = [Image.fromarray(frame) for frame in FRAMES]
    for name, options in {"a.webp": {"lossless": True, "method": 0}, "a.png": {"compress_level": 1}}.items():
        first.save(folder / name, save_all=True, append_images=others, duration=250, **options)
    film(folder / "a.avi", "FFV1")  # without loss
    (folder / "half.avi").write_bytes((folder / "a.avi").read_bytes()[:100000])
    (folder / "frames").mkdir()
    for number, frame in enumerate([first, *others]):
        frame.save(folder / "frames" / f"frame {number}.png")  # of which the tenth follows the ninth
    (folder / "frames" / "notes.txt").touch()
    first.crop((0, 0, 28, 28)).save(folder / "b.png")
    (folder / "half.webp").write_bytes((folder / "a.webp").read_bytes()[:50000])
    for name in ("empty", "mixed"):
        (folder / name).mkdir()
    small = [frame.resize((28, 28)) for frame in others[:4]]
    small[0].save(folder / "uneven.gif", save_all=True, append_images=small[1:], duration=[100, 300, 100, 100])
    small[0].save(folder / "mixed" / "0.png")
    (folder / "half.gif").write_bytes((folder / "uneven.gif").read_bytes()[:3800])  # within the data of a frame
    pages = [Image.new("RGB", size) for size in ((84, 56), (28, 28))]
    pages[0].save(folder / "pages.tif", save_all=True, append_images=pages[1:])
    film(folder / "fast.avi", "FFV1", FRAMES[:, :16, :16], 120)
    first.save(folder / "mixed" / "1.png")


def film(path, code, frames=FRAMES, fps=4) -> None:
    _, height, width, _ = frames.shape
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*code), fps, (width, height))
    assert writer.isOpened()
    for frame in frames:
        writer.write(frame[..., ::-1].copy())
    writer.release()


def make_hf_processor(model):
    from transformers import AutoImageProcessor, AutoVideoProcessor, Qwen3VLProcessor

    parts = (AutoImageProcessor, AutoVideoProcessor)
    images, videos = (kind.from_pretrained(model.folder) for kind in parts)
    return Qwen3VLProcessor(images, load_tokenizer(model.folder), videos)


@pytest.mark.parametrize("rate", [None, 1.0, 3.0])
def test_a_video_is_what_transformers_makes_of_it(read, model, rate):
    """Frames, times, ids and pixels, of a whole video that transformers takes frames of by itself."""
    (row,) = read(ROW | {"videos": [{"path": "a.webp"} | ({"rate": rate} if rate else {})]})
    metadata = {"total_num_frames": 12, "fps": 4.0}
    settings = {"video_metadata": [metadata], "return_tensors": "pt"} | ({"fps": rate} if rate else {})
    expected = make_hf_processor(model)(text=["<|video_pad|>?"], videos=[torch.from_numpy(FRAMES)], **settings)
    (video,) = row.images
    assert list(row.prompt_ids) == expected["input_ids"][0].tolist()
    assert list(video.grid) == expected["video_grid_thw"][0].tolist()
    assert len(video.frames) == {None: 6, 1.0: 4, 3.0: 9}[rate]  # transformers takes no fewer than four
    patches = build_image_reader(model, "", 64).processor.patches(row.images)
    assert torch.equal(patches, expected["pixel_values_videos"])


def test_a_video_is_the_same_however_it_is_kept(read, model):
    shown = {"frames": [0, 2, 9, 10, 11], "fps": 4}
    rows = read(*(ROW | {"videos": [shown | {"path": path}]} for path in ("a.webp", "a.png", "a.avi", "frames")))
    for row in rows:
        (video,) = row.images
        assert (video.size, video.grid, video.total, video.fps) == ((84, 56), (3, 4, 6), 12, 4.0)
        assert np.array_equal(decode_video(video), FRAMES[[0, 2, 9, 10, 11]])
        assert video.times(2) == [0.25, 2.375, 2.75], "the middle of two frames, the last of them twice"
        assert "<0.2 seconds>" in load_tokenizer(model.folder).decode(row.prompt_ids)
    assert len({row.prompt_ids for row in rows}) == 1 and len({row.images[0].digest for row in rows}) == 4


@pytest.mark.parametrize(("name", "fps"), [("a.mp4", 30), ("a.mkv", 24)])
def test_a_film_of_a_camera_is_read(read, tmp_path, name, fps):
    """With what a coder loses; a square that moves tells which frame is which. Its times are rounded, its rate not."""
    frames = np.zeros((30, 64, 96, 3), np.uint8)
    for number in range(30):
        frames[number, 16:48, 2 * number : 2 * number + 32] = (200, 40, 90)
    film(tmp_path / name, "mp4v", frames, fps)
    (row,) = read(ROW | {"videos": [{"path": name, "frames": [3, 10, 28]}]}, folder=tmp_path)
    (video,) = row.images
    assert (video.size, video.total) == ((96, 64), 30) and video.fps == fps
    assert np.abs(decode_video(video).astype(int) - frames[[3, 10, 28]]).mean() < 4


@pytest.mark.parametrize("fps", [3.0, 12.5, 23.976, 29.97, 30.0, 60.0])
def test_times_are_those_of_transformers(read, fps):
    """As they are written: a last bit decides how some are rounded."""
    from transformers import Qwen3VLProcessor

    (row,) = read(ROW | {"videos": ["a.webp"]})
    for frames in (tuple(range(400)), tuple(range(0, 900, 7)), (0, 5, 6)):
        expected = Qwen3VLProcessor._calculate_timestamps(None, list(frames), fps, 2)
        assert replace(row.images[0], frames=frames, fps=fps).times(2) == expected


def test_images_and_videos_come_in_the_order_of_their_places(read, model):
    parts = [{"type": kind} for kind in ("video", "image", "video")]
    clips = [{"path": "a.webp", "frames": [0, 1]}, {"path": "a.webp", "frames": [2, 3]}]
    fields = {"images": ["b.png"], "videos": clips, "answer": "y"}
    prompts = "<video><image><video>", [{"role": "u", "content": parts}]
    plain, spoken = read(*(fields | {"prompt": prompt} for prompt in prompts))
    shown = [(one.place[-7:], getattr(one, "frames", None)) for one in plain.images]
    assert shown == [("video 0", (0, 1)), ("image 0", None), ("video 1", (2, 3))]
    assert list(plain.prompt_ids) == make_placeholders(plain.images, model)
    assert spoken.prompt_ids[2:-3] == plain.prompt_ids
    vision = model.vision
    start, image, end, video = vision.start_token, vision.image_token, vision.end_token, vision.video_token
    assert collapse_images(plain.prompt_ids, plain.images, model) == [video, start, image, end, video]
    swapped = [{image: video, video: image}.get(token, token) for token in plain.prompt_ids]
    with pytest.raises(ValueError, match=r"video 0: a sequence has tokens of images and of videos in another order"):
        find_image_blocks(swapped, plain.images, vision)
    assert collapse_images((5, *plain.prompt_ids, 6), plain.images, model) == [5, video, start, image, end, video, 6]
    with patch("engines.images.placeholders.wraps_videos", return_value=True):
        wrapped = [start, video, end]
        assert collapse_images(plain.prompt_ids, plain.images, model) == [*wrapped, start, image, end, *wrapped]


def test_a_video_that_changed_is_named(read, kept, tmp_path):
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    rows = read(*(ROW | {"videos": [{"path": path, "fps": 4}]} for path in ("a.webp", "frames")), folder=tmp_path)
    (tmp_path / "a.webp").write_bytes((tmp_path / "a.png").read_bytes())
    (tmp_path / "frames" / "frame 3.png").unlink()
    for row in rows:
        with pytest.raises(ValueError, match=r'line \d: field "videos", video 0: .* was changed since the run started'):
            decode_video(row.images[0])


@pytest.mark.parametrize(
    ("videos", "message"),
    [
        (["none.webp"], r'rows.jsonl, line 2: field "videos", video 0: .*none.webp.* cannot be read: No such'),
        (["rows.jsonl"], r"line 2: .*video 0: .*rows.jsonl' cannot be read as a video; replace it, or give a folder"),
        (["half.avi"], r"line 2: .*video 0: .*half.avi' ends after \d of 12 frames; replace it"),
        (["half.webp"], r"line 2: .*video 0: .*half.webp' has no frame that can be decoded; replace it"),
        (["half.gif"], r"line 2: .*video 0: .*half.gif' cannot be decoded from frame \d on: .*; replace it"),
        (["pages.tif"], r"line 2: .*pages.tif' has frames of \[\(28, 28\), \(84, 56\)\] pixels, expected one size"),
        (["b.png"], r"line 2: .*video 0: .*b.png' has 1 frames, expected at least 2; one is shown as an image"),
        (["empty"], r"line 2: .*video 0: .*empty' has 0 frames, expected at least 2"),
        (["frames"], r'line 2: .*frames\' does not say how many frames it has in a second; give "fps"'),
        ([{"path": "a.webp", "fps": 5}], r"line 2: .*a.webp' has 4 frames in a second, the row has fps 5; correct"),
        ([{"path": "fast.avi", "fps": 240}], r"line 2: .*fast.avi' has 120 frames in a second, the row has fps 240"),
        (["uneven.gif"], r"line 2: .*uneven.gif' has frames that last 100 to 300 ms, expected one rate"),
        ([{"path": "a.webp", "rate": 5}], r"line 2: .*a.webp' has 4 frames a second, expected (a )?rate up to that"),
        ([{"path": "a.webp", "frames": [1, 12]}], r"line 2: .*a.webp' has 12 frames, of which \[1, 12\] cannot be"),
        ([{"path": "a.webp", "frames": [3, 2]}], r"line 2: .*has 12 frames, of which \[3, 2\] cannot be shown"),
        ([{"path": "a.webp", "frames": [3]}], r"line 2: .*a.webp' has 1 frames to show, expected at least 2"),
        ([{"path": "a.webp", "frames": [0, 1], "rate": 1}], r"line 2: .*video 0 has both rate and frames"),
        ([{"path": "a.webp", "speed": 2}], r"line 2: .*video 0 has 'speed', expected some of path, fps, rate, frames"),
        ([{"path": "a.webp", "fps": "4"}], r"line 2: .*video 0 has fps '4', expected a number"),
        ([7], r'line 2: .*video 0 must be a path, \{"path": ..., "fps": ...\} or \{"video": path\}, got int'),
        ([{"video": "a.webp", "nframes": 4}], r"line 2: .*video 0 has 'nframes', expected some of path, fps, rate"),
        ([{"path": "mixed", "fps": 2}], r"line 2: .*mixed' has frames of \[\(28, 28\), \(84, 56\)\] pixels, expected"),
        (["a.webp"] * 2, r"line 2: the prompt has places for 1 videos, the row has 2 in its field"),
        ([], r"line 2: the prompt has places for 1 videos, the row has 0"),
    ],
)
def test_a_broken_video_is_named(read, videos, message):
    with pytest.raises(ValueError, match=message):
        read({"prompt": "x", "answer": "y"}, ROW | {"videos": videos})


def test_a_video_that_is_larger_than_the_bound_is_named(read):
    rows = {"prompt": "<image>", "images": ["b.png"], "answer": "y"}, ROW | {"videos": ["a.webp"]}
    assert len(read(*rows)) == 2
    with pytest.raises(ValueError, match=r"2: .*video 0: .*a.webp', 6 frames, 84 x 56 pixels, and .* take 1.0 MB dec"):
        read(*rows, limit_mb=1)


def test_as_many_frames_are_shown_as_the_processor_says(model, kept, tmp_path):
    """At most, and with a rate of a row by that; a processor that has a rate beside the number is refused."""
    shutil.copytree(model.folder, tmp_path / "model")
    path = tmp_path / "model" / "video_preprocessor_config.json"
    settings = json.loads(path.read_text())

    def count(video, **change) -> int:
        path.write_text(json.dumps(settings | change))
        reader = build_image_reader(ModelSpec.from_folder(tmp_path / "model"), str(tmp_path), 64)
        return len(reader.read_row({"videos": [video]}, "row 0", DATA, kept)[0].frames)

    assert [count("a.webp", num_frames=number, fps=None) for number in (3, 99)] == [3, 12]
    assert count({"path": "a.webp", "rate": 3}, num_frames=3, fps=None) == 9
    with pytest.raises(ValueError, match=r"has num_frames 3 and fps 2, .* expected one of them; set the other to null"):
        count("a.webp", num_frames=3, fps=2)
    with pytest.raises(ValueError, match=r"video_preprocessor_config.json in .* has size .* name its min_pixels short"):
        count("a.webp", size={"max_pixels": 12544, "min_pixels": 3136})


def test_a_folder_without_a_video_processor_is_named(model, kept, tmp_path):
    shutil.copytree(model.folder, tmp_path / "model")
    (tmp_path / "model" / "video_preprocessor_config.json").unlink()
    reader = build_image_reader(ModelSpec.from_folder(tmp_path / "model"), str(tmp_path), 64)
    assert reader.read_row({"images": ["b.png"]}, "row 0", DATA, kept)
    with pytest.raises(ValueError, match=r"a video processor of class \w+, expected Qwen3VLVideoProcessor; save the"):
        reader.read_row({"videos": ["a.webp"]}, "row 0", DATA, kept)
