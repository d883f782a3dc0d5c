"""Videos in vLLM: positions, logprobs against HuggingFace before and after new weights, and against the trainer."""

import dataclasses
from importlib.metadata import version
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.version import Version
from support import rollout_workers
from support.factors import IMAGE_STATE_FAMILIES, VIDEO_FAMILIES
from support.huggingface import measure_differences, move_weights
from support.ranks.vlm_cases import IMAGE_SIZES, make_images, make_prompts, make_videos
from support.rollout_workers import draw, start_engine

from engines.batch.samples import Image, Sampling
from engines.config import VllmConfig
from engines.images.columns import find_image_blocks, make_multimodal_positions
from engines.images.placeholders import make_placeholders, write_times
from engines.images.video import Video
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface
from rlworker.checks.tiny.models import make_tiny_model

CONFIG = VllmConfig(max_new_tokens=6, max_model_len=256, max_num_seqs=64, kv_cache_mb=64)
SHORT, LONG, FILE = (len(IMAGE_SIZES) + number for number in range(3))
ROWS = ((SHORT,), (), (0, LONG), (FILE, 1, SHORT), (LONG,))
"""A video; text; an image and a video that lasts longer than it is wide; both around an image; the long one again."""


LARGE = [pytest.param(family, marks=pytest.mark.large) for family in IMAGE_STATE_FAMILIES]


@pytest.fixture(scope="module", params=[*VIDEO_FAMILIES, *LARGE])
def model(request, tmp_path_factory):
    return ModelSpec.from_folder(make_tiny_model(tmp_path_factory.mktemp(request.param), request.param))


def make_video(grid: tuple[int, int, int]) -> Video:
    frames = tuple(range(2 * grid[0]))
    return Video("a.webp", "0", (14 * grid[2], 14 * grid[1]), grid, "video", frames, len(frames), 2.0)


SHAPES = {"wide": (2, 4, 8), "longer than wide": (9, 4, 2), "high, of many frames": (5, 12, 4)}


@pytest.mark.large  # it imports vLLM
@pytest.mark.parametrize("shape", SHAPES)
def test_positions_are_those_of_vllm(model, shape):
    """Of a video between text, and of one around an image."""
    from transformers import AutoConfig
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    video, image = make_video(SHAPES[shape]), Image("b.png", "1", (56, 28), (1, 2, 4), "image")
    for shown in ((video,), (video, image, video)):
        ids, features = [20, 21, 22], []
        for one in shown:
            placed, kind = make_placeholders([one], model), "video" if isinstance(one, Video) else "image"
            offset = len(ids) + (0 if kind == "video" else 1)  # a video's begins with its time
            data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(one.grid))}
            features.append(MultiModalFeatureSpec(data, kind, one.digest, PlaceholderRange(offset, len(placed))))
            ids += [*placed, 23, 24]
        config = AutoConfig.from_pretrained(model.folder)
        expected, _ = Qwen3VLForConditionalGeneration._get_mrope_input_positions(ids, features, config)
        blocks = find_image_blocks(ids, shown, model.vision)
        assert np.array_equal(make_multimodal_positions(blocks, shown, model.vision.merge), expected.T.numpy())


def test_times_are_written_as_vllm_writes_them(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    video = dataclasses.replace(make_video((3, 2, 2)), frames=(0, 3, 7, 8, 12), total=13)
    texts = ("<0.8 seconds>", "<3.8 seconds>", "<6.0 seconds>")  # the middle of 0 and 1.5, 3.5 and 4, 6 and 6
    assert write_times(video, model.vision, model.folder) == [
        tokenizer.encode(text, add_special_tokens=False) for text in texts
    ]
    # vLLM 0.23 writes them as text, and reads that again.
    assert [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in texts] == [*texts]


@pytest.mark.large  # it imports vLLM
@pytest.mark.parametrize(("grid", "seconds"), [((2, 8, 12), 1.0), ((6, 4, 6), 1.0), ((6, 4, 6), 0.4)])
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL"])
def test_transformers_and_vllm_disagree_about_text_after_a_long_video(family, grid, seconds):
    """Upstream's own fault, for which videos of both families are refused: were it mended, this would fail.

    Older transformers give the frames themselves other times: 5.5 one time to all, 5.17 no part of a second.
    """
    name = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl"}[family]
    config = resolve_name(f"transformers:{family}Config")()
    config.vision_config.tokens_per_second = 2 if family == "Qwen2_5_VL" else 1
    model = resolve_name(f"transformers.models.{name}.modeling_{name}:{family}Model")
    served = resolve_name(f"vllm.model_executor.models.{name}:{family}ForConditionalGeneration")
    hf, vllm = SimpleNamespace(config=config), SimpleNamespace(config=config)
    hf.get_vision_position_ids = model.get_vision_position_ids.__get__(hf)
    vllm.iter_mm_grid_thw = served.iter_mm_grid_thw.__get__(vllm)
    kinds = [0] * 3 + [2] * (grid[0] * grid[1] * grid[2] // 4) + [0] * 4
    timing = {"video_grid_thw": torch.tensor([grid])}
    if family == "Qwen2_5_VL":  # the other counts frames
        timing["second_per_grid_ts"] = torch.tensor([seconds])
    ids = torch.zeros(1, len(kinds), dtype=torch.long)
    theirs, _ = model.get_rope_index(hf, ids, torch.tensor([kinds]), **timing)
    data = {key: SimpleNamespace(data=tensor[0]) for key, tensor in timing.items()}
    feature = SimpleNamespace(modality="video", mm_position=SimpleNamespace(offset=3), data=data)
    others, _ = served.get_mrope_input_positions(vllm, ids[0].tolist(), [feature])
    if not torch.equal(theirs[:, 0, :-4], others[:, :-4]):
        assert Version(version("transformers")) < Version("5.19"), "up to its end they agree"
        return
    step = 2 * seconds if family == "Qwen2_5_VL" else 1
    lasts_longer = grid[0] * step > max(grid[1:]) / 2
    assert torch.equal(theirs[:, 0], others) != lasts_longer


@pytest.fixture(scope="module")
def rollout(model, cluster, tmp_path_factory):
    """An engine and prompts of it."""
    folder = tmp_path_factory.mktemp("shown")
    with start_engine(model, CONFIG) as worker:
        yield worker, make_prompts(model, [*make_images(folder), *make_videos(folder)], ROWS)


@pytest.mark.large
@pytest.mark.usefixtures("by_value")
def test_logprobs_before_and_after_new_weights(rollout, model, measured):
    worker, prompts = rollout
    hf, sampling = load_huggingface(model), Sampling(3, 1.0, 6, (1,), (0,))

    def send():
        weights = [(model.find_folder_name(name), tensor.detach()) for name, tensor in hf.named_parameters()]
        rollout_workers.send(worker, weights, 100_000)

    send()
    for label in ("before", "after"):
        completions = draw(worker, prompts, sampling)
        found = measure_differences(hf, prompts, completions, 1.0, model)
        measured({f"mean {label}": float(found.mean()), f"largest {label}": float(found.max())})
        assert found.mean() <= 2e-6 and found.max() <= 1e-4
        if label == "before":
            move_weights(hf, scale=0.02)
            stale = measure_differences(hf, prompts, completions, 1.0, model)
            assert stale.max() > 0.05, "the test can tell old weights from new"
            send()


@pytest.mark.large
@pytest.mark.usefixtures("by_value")
def test_a_video_that_changed_is_named(rollout):
    worker, prompts = rollout
    (video,) = prompts[0].images
    other = dataclasses.replace(prompts[0], images=(dataclasses.replace(video, digest="0" * 64),))
    with pytest.raises(ValueError, match=r"row 0, image 0: .*was changed since the run started"):
        draw(worker, [other], Sampling(1, 1.0, 6, (1,), (0,)))
