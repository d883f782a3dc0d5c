"""What is read of a vision-language model's config.json, and what is refused."""

import json
import math
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.factors import IMAGE_EXPERT_FAMILIES, IMAGE_FAMILIES, IMAGE_STATE_FAMILIES
from support.models import make_vlm, read_config, write_config
from support.ranks.vlm_cases import QWEN2_5_VL_7B, name_part

from engines.images.processor import ImageProcessor
from engines.megatron.rotary import Rotary
from engines.models.folders.hf_folder import check_tensors
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.models import make_tiny_model


def test_a_folder_from_before_text_config(tmp_path):
    spec = read_config(tmp_path, QWEN2_5_VL_7B)
    assert (spec.layers, spec.hidden, spec.head_dim, spec.vocab, spec.tied) == (28, 3584, 128, 152064, False)
    assert (spec.ropes[0]["rope_type"], spec.ropes[0]["rope_theta"]) == ("default", 1e6)
    assert [spec.vision.axes.count(axis) for axis in range(3)] == [16, 24, 24]
    assert spec.banned_tokens == (151652, 151653, 151655, 151656)
    shapes = spec.vision.tower.weights(spec.vision)
    assert len(shapes) == 1 + 32 * 12 + 5 and shapes["merger.mlp.0.weight"] == (5120, 5120)
    assert sum(map(math.prod, shapes.values())) == 676_550_144, "of the tower of Qwen2.5-VL-7B"


@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *IMAGE_EXPERT_FAMILIES, *IMAGE_STATE_FAMILIES])
def test_names_and_shapes_are_those_of_the_saved_model(tmp_path, family):
    spec = ModelSpec.from_folder(make_vlm(tmp_path, family))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: spec.find_hf_shape(name) for name in spec.list_hf_names()} == shapes
    assert {name: spec.find_part(name) for name in shapes} == {name: name_part(name) for name in shapes}


ROTARY = {"qwen2_5_vl": "Qwen2_5_VLRotaryEmbedding", "qwen3_vl": "Qwen3VLTextRotaryEmbedding"}
ROTARY["qwen3_5"] = "Qwen3_5TextRotaryEmbedding"


@pytest.mark.parametrize("family", ROTARY)
def test_interleaved_and_sectioned_axes_are_those_of_transformers(tmp_path, family):
    """Each frequency's axis, found from the angles that transformers itself computes."""
    from transformers import AutoConfig

    folder = make_vlm(tmp_path, family)
    config = AutoConfig.from_pretrained(folder).text_config
    rotary = resolve_name(f"transformers.models.{family}.modeling_{family}:{ROTARY[family]}")(config)
    axes = ModelSpec.from_folder(folder).vision.axes
    for axis in range(3):
        positions = torch.zeros(3, 1, 1, dtype=torch.long)
        positions[axis] = 1
        _, sin = rotary(torch.zeros(1), positions)
        if sin.dim() == 4:  # transformers 5.5 chooses the axes of Qwen2.5-VL where it rotates, and has all of them here
            sections = sin.split(config.rope_parameters["mrope_section"] * 2, dim=-1)
            sin = torch.cat([section[number % 3] for number, section in enumerate(sections)], dim=-1)
        turned = (sin[0, 0, : len(axes)] != 0).nonzero()[:, 0].tolist()
        assert turned == [i for i, own in enumerate(axes) if own == axis]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": ...}, "lacks vision_config"),
        ({"vision_config.depth": ...}, "lacks the keys ['vision_config.depth']"),
        ({"image_token_id": ...}, "lacks the keys ['image_token_id']"),
        ({"vision_config.num_heads": "16"}, "has vision_config.num_heads '16', expected"),
        ({"vision_config.patch_size": 0}, "has vision_config.patch_size 0, expected"),
        ({"video_token_id": -1}, "has video_token_id -1, expected the number of a token"),
        ({"vision_config.hidden_act": "relu"}, "has vision_config.hidden_act 'relu', expected 'silu'"),
        ({"vision_config.out_hidden_size": 4096}, "has vision_config.out_hidden_size 4096, expected hidden_size 3584"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "of 65 frequencies in all, expected 64"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [16, 24, 24]}}, "has scaled rotary embedd"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24], "mrope_interleaved": True}},
            "has mrope_interleaved True, expected False: transformers computes so in any event",
        ),
        ({"rope_scaling": {"type": "mrope"}}, "has mrope_section None, expected three whole numbers"),
        ({"image_token_id": 152064}, "has an image token 152064, expected one below vocab_size 152064"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "expected ['Qwen2_5_VLForConditionalGeneration']"),
        ({"model_type": "glm4v"}, "has model_type 'glm4v', expected one of ['gemma3', "),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(tmp_path, QWEN2_5_VL_7B, **change)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_a_critic_is_no_model_that_speaks(tmp_path, family):
    """transformers has no class for it: by its name others refuse it, and so do we as an actor."""
    critic = ModelSpec.from_folder(make_vlm(tmp_path, family), head="value")
    assert critic.architecture.endswith("ForTokenClassification") and not critic.tied
    assert critic.list_hf_names() >= {"score.weight", "score.bias"}
    write_config(tmp_path, tmp_path, architectures=[critic.architecture])
    assert ModelSpec.from_folder(tmp_path, head="value").list_hf_names() == critic.list_hf_names()
    with pytest.raises(ValueError, match=r"has architectures .*ForTokenClassification.*, expected .*ForCond"):
        ModelSpec.from_folder(tmp_path)


YARN = {"full_attention": {"rope_type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_tokens_per_image": 16, "text_config.sliding_window": 12}, "mm_tokens_per_image 16 above its sliding_win"),
        ({"mm_tokens_per_image": 9}, "has mm_tokens_per_image 9, expected the square of a divisor of 4"),
        ({"text_config.final_logit_softcapping": 30.0}, "sets final_logit_softcapping, which the engine does not"),
        ({"text_config.attn_logit_softcapping": 50.0}, "sets attn_logit_softcapping, which the engine does not"),
        ({"text_config.use_bidirectional_attention": True}, "sets use_bidirectional_attention, which the engine does"),
        ({"vision_config.hidden_act": "relu"}, "has vision_config.hidden_act 'relu', expected 'gelu_pytorch_tanh'"),
        ({"text_config.hidden_activation": "silu"}, "has hidden_activation 'silu', expected 'gelu_pytorch_tanh'"),
        ({"vision_config.patch_size": 0}, "vision_config.patch_size 0, expected a whole number of at least 1"),
        ({"vision_config.image_size": "8"}, "vision_config.image_size '8', expected a whole number of at least 1"),
        ({"mm_tokens_per_image": -1}, "mm_tokens_per_image -1, expected a whole number of at least 1"),
        ({"text_config.sliding_window": None}, "text_config.sliding_window None, expected a whole number of at"),
        ({"text_config": None}, "text_config.hidden_size None, expected a whole number of at least 1"),
        ({"text_config.rope_parameters": YARN}, "has rope_type 'yarn', expected 'default' or 'linear'"),
        ({"text_config.rope_parameters": {"rope_theta": 1e4}}, "expected an object for each of ['sliding_attention'"),
        ({"image_token_index": 131}, "has an image token 131, expected one below vocab_size 131"),
    ],
)
def test_what_cannot_be_built_of_gemma_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(tmp_path, make_tiny_model(tmp_path, "gemma3"), **change)


def test_rotary_bases_that_a_config_leaves_out_are_those_of_transformers(tmp_path):
    """A configuration may name the kind of scaling alone."""
    from transformers import Gemma3TextConfig

    bare = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear", "factor": 8.0}}
    expected = Gemma3TextConfig(rope_parameters=json.loads(json.dumps(bare))).rope_parameters
    spec = read_config(tmp_path, make_tiny_model(tmp_path, "gemma3"), **{"text_config.rope_parameters": bare})
    bases = [rope["rope_theta"] for rope in spec.ropes]
    assert bases == [expected[kind]["rope_theta"] for kind in bare]


def test_scaling_beside_the_rotary_settings_of_each_kind_is_of_full_attention(tmp_path):
    """As transformers has it, where a folder that it saved gets the block that every guide shows."""
    from transformers import AutoConfig

    bare = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear", "factor": 8.0}}
    changes = {"text_config.rope_parameters": bare, "text_config.rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    spec = read_config(tmp_path, make_tiny_model(tmp_path, "gemma3"), **changes)
    expected = AutoConfig.from_pretrained(spec.folder).text_config.rope_parameters
    assert [rope.get("factor") for rope in spec.ropes] == [expected[kind].get("factor") for kind in bare] == [None, 4.0]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_rotary_base_and_a_window_that_a_config_leaves_out_are_those_of_transformers(tmp_path, family):
    from transformers import AutoConfig

    folder = make_vlm(tmp_path, family)
    rope = json.loads(Path(folder, "config.json").read_text())["text_config"]["rope_parameters"]
    left_out = dict.fromkeys(("rope_theta", "sliding_window", "max_window_layers"), ...)
    left_out["rope_parameters"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    changes = {f"text_config.{key}": value for key, value in left_out.items()}
    if windows := not family.startswith("qwen3"):
        changes |= {"text_config.use_sliding_window": True, "text_config.layer_types": ...}
    spec = read_config(tmp_path, folder, **changes)
    expected = AutoConfig.from_pretrained(spec.folder).text_config
    assert [each["rope_theta"] for each in spec.ropes] == [expected.rope_parameters["rope_theta"]]
    if windows:
        assert {rule.window for rule in spec.rules} == {None} and {*expected.layer_types} == {"full_attention"}
        low = read_config(tmp_path, spec.folder, **{"text_config.max_window_layers": 0})
        assert {rule.window for rule in low.rules} == {expected.sliding_window}


def test_a_window_that_transformers_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sets use_sliding_window, which the engine does not build"):
        read_config(tmp_path, make_vlm(tmp_path, "qwen3_vl"), **{"text_config.use_sliding_window": True})


def test_a_scaled_rotation_beside_a_tower_is_that_of_the_language_model(tmp_path):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = make_vlm(tmp_path, "internvl")
    spec = read_config(tmp_path, folder, **{"text_config.rope_parameters": yarn})
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(spec.folder).text_config, "cpu")
    rotary = Rotary(spec, torch.device("cpu"))
    assert torch.equal(rotary.inverse_frequency.flatten(), frequencies)
    assert rotary.scale.item() == pytest.approx(scale)


def test_pan_and_scan_is_refused_by_name(tmp_path):
    """It cuts an image into several of other sizes. The released folders say null, others nothing or false."""
    folder = make_tiny_model(tmp_path, "gemma3")
    path, vision = Path(folder, "processor_config.json"), ModelSpec.from_folder(folder).vision
    settings = json.loads(path.read_text())
    for said in ({"do_pan_and_scan": None}, {"do_pan_and_scan": False}, {}, {"do_pan_and_scan": True}):
        settings["image_processor"].pop("do_pan_and_scan", None)
        settings["image_processor"] |= said
        path.write_text(json.dumps(settings))
        if True not in said.values():
            ImageProcessor(folder, vision)
    with pytest.raises(ValueError, match="has do_pan_and_scan True, expected false or null"):
        ImageProcessor(folder, vision)


def test_weights_by_other_names_are_refused_by_name(tmp_path):
    """transformers 5 saves a tower by names that vLLM does not know."""
    path = Path(make_tiny_model(tmp_path, "gemma3")) / "model.safetensors"
    weights = {name.replace("vision_tower.vision_model.", "vision_tower."): x for name, x in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \['vision_tower.vision_model.*unexpected \['vision_tower.emb"):
        check_tensors(SafetensorsFolder(str(tmp_path)), ModelSpec.from_folder(tmp_path))


def test_released_configs_leave_out_what_transformers_takes_by_itself(tmp_path):
    """Every key of a config that says no more than the released ones is read as transformers reads it."""
    from transformers import Gemma3Config

    small = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240}}
    released = small | {
        "text_config": small["text_config"] | {"num_hidden_layers": 34, "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14},
    }
    spec, want = read_config(tmp_path, released), Gemma3Config(**released)
    text, vision = want.text_config, want.vision_config
    heads = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    assert (spec.heads, spec.kv_heads, spec.head_dim) == heads
    sizes = text.vocab_size, text.max_position_embeddings, text.rms_norm_eps
    assert (spec.vocab, spec.max_positions, spec.norm_eps) == sizes
    assert [rule.window is None for rule in spec.rules] == [kind == "full_attention" for kind in text.layer_types]
    assert spec.options[0].attention_scale == text.query_pre_attn_scalar**-0.5
    thetas = [rope["rope_theta"] for rope in spec.ropes]
    assert sorted(thetas) == sorted(rope["rope_theta"] for rope in text.rope_parameters.values())
    assert (spec.vision.image_token, spec.vision.start_token) == (want.image_token_index, want.boi_token_index)
    assert (spec.vision.side, spec.vision.width) == (vision.image_size // vision.patch_size, vision.hidden_size)
