"""What is read of a vision-language model's config.json, and what is refused."""

import copy
import json

import pytest
from support.factors import IMAGE_FAMILIES
from support.models import make_vlm
from support.ranks.vlm_cases import QWEN2_5_VL_7B, name_part

from engines.models.spec import ModelSpec


def spec_of(folder, config: dict) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.from_folder(folder)


def test_a_folder_from_before_text_config(tmp_path):
    spec = spec_of(tmp_path, QWEN2_5_VL_7B)
    assert (spec.layers, spec.hidden, spec.head_dim, spec.vocab, spec.tied) == (28, 3584, 128, 152064, False)
    assert (spec.ropes[0]["rope_type"], spec.ropes[0]["rope_theta"]) == ("default", 1e6)
    assert [spec.vision.axes.count(axis) for axis in range(3)] == [16, 24, 24]
    assert spec.banned_tokens == (151652, 151653, 151655, 151656)
    shapes = spec.vision.list_weight_shapes()
    assert len(shapes) == 1 + 32 * 12 + 5 and shapes["merger.mlp.0.weight"] == (5120, 5120)
    numbers = sum(_size(shape) for shape in shapes.values())
    assert numbers == 676_550_144, "of the tower of Qwen2.5-VL-7B"


def _size(shape) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_names_and_shapes_are_those_of_the_saved_model(tmp_path, family):
    from safetensors import safe_open

    spec = ModelSpec.from_folder(make_vlm(tmp_path, family))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: spec.find_hf_shape(name) for name in spec.list_hf_names()} == shapes
    assert {name: spec.find_part(name) for name in shapes} == {name: name_part(name) for name in shapes}


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_interleaved_and_sectioned_axes_are_those_of_transformers(tmp_path, family):
    """Each frequency's axis, found from the angles that transformers itself computes."""
    import torch
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    folder = make_vlm(tmp_path, family)
    config = AutoConfig.from_pretrained(folder).text_config
    rotary = (Qwen3VLTextRotaryEmbedding if family == "qwen3_vl" else Qwen2_5_VLRotaryEmbedding)(config)
    axes = ModelSpec.from_folder(folder).vision.axes
    for axis in range(3):
        positions = torch.zeros(3, 1, 1, dtype=torch.long)
        positions[axis] = 1
        _, sin = rotary(torch.zeros(1), positions)
        turned = (sin[0, 0, : len(axes)] != 0).nonzero()[:, 0].tolist()
        assert turned == [i for i, own in enumerate(axes) if own == axis]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "lacks vision_config"),
        ({"vision_config.depth": None}, "lacks the keys ['vision_config.depth']"),
        ({"image_token_id": None}, "lacks the keys ['image_token_id']"),
        ({"vision_config.num_heads": "16"}, "has vision_config.num_heads '16', expected"),
        ({"vision_config.patch_size": 0}, "has vision_config.patch_size 0, expected"),
        ({"video_token_id": -1}, "has video_token_id -1, expected the number of a token"),
        ({"vision_config.hidden_act": "relu"}, "has vision_config.hidden_act 'relu', expected 'silu'"),
        ({"vision_config.out_hidden_size": 4096}, "has vision_config.out_hidden_size 4096, expected hidden_size 3584"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "of 65 frequencies in all, expected 64"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [16, 24, 24]}},
            "has scaled rotary embeddings",
        ),
        ({"rope_scaling": {"type": "mrope"}}, "has mrope_section None, expected three whole numbers"),
        ({"image_token_id": 152064}, "has an image token 152064, expected one below vocab_size 152064"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "expected ['Qwen2_5_VLForConditionalGeneration']"),
        ({"model_type": "qwen2_vl"}, "has model_type 'qwen2_vl', expected one of ['llama', "),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(tmp_path, change, message):
    config = copy.deepcopy(QWEN2_5_VL_7B)
    for key, value in change.items():
        *outer, last = key.split(".")
        inner = config[outer[0]] if outer else config
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    with pytest.raises(ValueError) as error:
        spec_of(tmp_path, config)
    assert message in str(error.value)


def test_no_critic_of_it_is_built(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_7B))
    with pytest.raises(ValueError, match="of which no critic is built; use GRPO"):
        ModelSpec.from_folder(tmp_path, head="value")
