import json

import pytest

from engines.config import MegatronConfig, VllmConfig
from engines.models import ModelSpec


def edit_config(make_hf_model, tmp_path, **changes) -> str:
    config = json.loads(open(f"{make_hf_model('qwen2', False)}/config.json").read())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return str(tmp_path)


def test_names_are_those_of_the_saved_model(make_hf_model):
    from safetensors import safe_open

    for family, tied in (("qwen2", True), ("qwen2", False), ("llama", False)):
        folder = make_hf_model(family, tied)
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            assert ModelSpec.from_folder(folder).all_hf_names() == set(file.keys())


def test_windows_follow_layer_types(make_hf_model):
    assert ModelSpec.from_folder(make_hf_model("qwen2", False)).windows == (None,)
    assert ModelSpec.from_folder(make_hf_model("qwen2-window", False)).windows == (None, None, 4, 4)


def test_configs_of_older_transformers_mean_the_same(make_hf_model, tmp_path):
    """``rope_scaling`` with ``type``, and sliding windows without ``layer_types``."""
    old = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    spec = ModelSpec.from_folder(edit_config(make_hf_model, tmp_path, **old))
    assert (spec.rope["rope_type"], spec.rope["factor"], spec.rope_theta) == ("linear", 2.0, 500.0)
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "layer_types": None}
    spec = ModelSpec.from_folder(edit_config(make_hf_model, tmp_path, **window))
    assert spec.windows == (None, None, None, 4)
    assert ModelSpec.from_folder(
        edit_config(make_hf_model, tmp_path, **window | {"use_sliding_window": False})
    ).windows == (None,)


def test_a_missing_folder_and_a_missing_config_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere' does not exist"):
        ModelSpec.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelSpec.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            r"model_type 'mamba', which has no name table; expected one of \['llama', 'qwen2', 'qwen3'\]",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type 'dynamic'"),
    ],
)
def test_what_the_engine_lacks_is_refused(make_hf_model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_folder(edit_config(make_hf_model, tmp_path, **changes))


def test_wrong_ranks_are_refused():
    with pytest.raises(ValueError, match=r"tp=2 x pp=1 x cp=2 needs a multiple of 4 ranks, got 6; set --actor.ranks"):
        MegatronConfig(tp=2, cp=2, ranks=6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tp=3, ranks=3), "tp=3 does not divide the model's 4 attention heads"),
        (dict(tp=4, ranks=4), "tp=4 does not divide the model's 2 key-value heads"),
        (dict(pp=3, ranks=3), "pp=3 does not divide the model's 4 layers"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(make_hf_model, settings, message):
    with pytest.raises(ValueError, match=message):
        MegatronConfig(**settings).check_model(ModelSpec.from_folder(make_hf_model("qwen2", False)))


def test_rollout_limits_are_checked(make_hf_model):
    with pytest.raises(ValueError, match="max_model_len=512 is above the model's 256 positions"):
        VllmConfig(max_model_len=512).check_model(ModelSpec.from_folder(make_hf_model("qwen2", False)))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        VllmConfig(temperature=0.0)
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        VllmConfig(max_new_tokens=64, max_model_len=64)
