"""InternVL: its two language models, what is read of a config and a tokenizer, and what is refused by name."""

import json
from pathlib import Path

import pytest
from support.models import make_vlm, read_config

from engines.models.folders.hf_folder import check_tensors
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_vlm(tmp_path_factory.mktemp("internvl"), "internvl")


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """A folder with its tokenizer, for another config.json."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(Path(folder, name).read_text())
    return tmp_path


def test_the_other_language_model(tmp_path):
    """Qwen3's norms of queries and keys, and a size of heads of its own, in place of Qwen2's biases."""
    folder = make_vlm(tmp_path, "internvl", model_type="qwen3", head_dim=48)
    spec = ModelSpec.from_folder(folder)
    check_tensors(SafetensorsFolder(folder), spec)
    assert (spec.model_type, spec.head_dim, spec.qk_norm, spec.qkv_bias) == ("internvl", 48, True, False)


def test_what_is_read(folder):
    """Tiles of 4 x 4 patches of 14, of which 2 x 2 are a token; positions of text."""
    spec = ModelSpec.from_folder(folder)
    vision = spec.require_vision()
    assert (spec.qkv_bias, spec.qk_norm) == (True, False)
    assert (vision.side, vision.patch, vision.merge, vision.positions) == (4, 14, 2, 17)
    assert (vision.start_token, vision.image_token, vision.end_token, vision.video_token) == (90, 91, 92, 93)
    assert vision.axes == () and vision.out == spec.hidden


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config.model_type": "llama"}, r"text_config.model_type 'llama', expected one of \['qwen2', 'qwen3'\]"),
        ({"vision_feature_layer": -2}, "vision_feature_layer -2, expected -1: another is not built"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy 'full', expected 'default'"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act 'silu', expected 'gelu'"),
        ({"vision_config.hidden_act": "silu"}, "vision_config.hidden_act 'silu', expected 'gelu'"),
        ({"vision_config.use_qk_norm": True}, "vision_config.use_qk_norm True, expected False"),
        ({"vision_config.norm_type": "rms_norm"}, "vision_config.norm_type 'rms_norm', expected 'layer_norm'"),
        ({"vision_config.attention_bias": "no"}, "vision_config.attention_bias 'no', expected true or false"),
        ({"vision_config.use_mask_token": True}, "vision_config.use_mask_token True, expected False"),
        ({"vision_config.hidden_dropout_prob": 0.1}, "vision_config.hidden_dropout_prob 0.1, expected 0"),
        ({"vision_config.image_size": [56, 84]}, r"vision_config.image_size \[56, 84\], expected the side of a square"),
        ({"vision_config.patch_size": 0}, "vision_config.patch_size 0, expected the side of a square, at least 1"),
        ({"vision_config.hidden_size": "48"}, "vision_config.hidden_size '48', expected a whole number"),
        ({"downsample_ratio": 0.4}, "downsample_ratio 0.4, expected 1 / n with n a divisor of 4"),
        ({"downsample_ratio": 1 / 3}, "downsample_ratio 0.33.*, expected 1 / n with n a divisor of 4"),
        ({"downsample_ratio": 0}, "downsample_ratio 0, expected 1 / n"),
        ({"image_seq_length": 256}, "image_seq_length 256, expected 4, the tokens of a tile"),
        ({"image_token_id": "91"}, "image_token_id '91', expected the number of a token"),
        ({"image_token_id": 99}, "an image token 99, expected one below vocab_size 99"),
        ({"text_config.attention_bias": True}, "sets attention_bias, which the engine does not build"),
        ({"quantization_config": {"quant_method": "fp8"}}, "sets quantization_config"),
        ({"architectures": ["InternVLChatModel"]}, r"expected \['InternVLForConditionalGeneration'\]"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(folder, copied, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(copied, folder, **changes)


def test_the_tokens_of_images_are_asked_of_the_tokenizer(folder, copied):
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps(settings | {"end_image_token": "</img>"}))
    with pytest.raises(ValueError, match=r"the tokenizer in .* lacks \['</img>'\], which mark images and videos"):
        read_config(copied, folder)
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json, which says what marks images; save it there"):
        read_config(copied, folder)


def test_tied_is_what_the_whole_says_and_else_the_language_model(folder, copied):
    cases = ((True, False, True), (False, True, False), (..., False, False), (..., True, True), (..., ..., True))
    for whole, language, tied in cases:
        changes = {"tie_word_embeddings": whole, "text_config.tie_word_embeddings": language}
        assert read_config(copied, folder, **changes).tied == tied


@pytest.mark.parametrize("language", ["qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_what_transformers_takes(copied, language):
    from transformers import InternVLConfig

    sparse = {"model_type": "internvl", "text_config": {"model_type": language}, "vision_config": {}}
    want = InternVLConfig(**json.loads(json.dumps(sparse)))
    text, tower = want.text_config, want.vision_config
    spec = read_config(copied, sparse)
    sizes = dict(hidden="hidden_size", ffn="intermediate_size", layers="num_hidden_layers", heads="num_attention_heads")
    sizes |= dict(kv_heads="num_key_value_heads", vocab="vocab_size", max_positions="max_position_embeddings")
    for ours, theirs in (sizes | {"norm_eps": "rms_norm_eps"}).items():
        assert getattr(spec, ours) == getattr(text, theirs), theirs
    assert spec.head_dim == getattr(text, "head_dim", text.hidden_size // text.num_attention_heads)
    assert spec.ropes[0]["rope_theta"] == text.rope_parameters["rope_theta"]
    vision = spec.require_vision()
    wide = tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers, tower.num_attention_heads
    assert (vision.width, vision.ffn, vision.depth, vision.heads) == wide
    assert (vision.image_token, vision.merge) == (want.image_token_id, round(1 / want.downsample_ratio))
    assert [vision.side * vision.patch] * 2 == list(tower.image_size)
