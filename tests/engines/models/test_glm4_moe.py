"""GLM-4.5's config.json, the layers of its folders that are not trained, and the type of the bias in one."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import read_config

from engines.config import MegatronConfig, VllmConfig
from engines.models.folders.hf_folder import check_tensors, save_hf_folder
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec

AIR = json.loads("""{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
    "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": true,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
    "use_qk_norm": false, "vocab_size": 151552}""")
"""The config.json of GLM-4.5-Air."""
LARGE = {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160}
LARGE |= {"first_k_dense_replace": 3, "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "use_qk_norm": True}
"""Keys in which that of GLM-4.5 differs."""


@pytest.mark.parametrize(
    ("changes", "dense", "billions"), [({}, 1, (106.85, 12)), (LARGE, 3, (352.80, 32))], ids=["Air", "4.5"]
)
def test_published_sizes_are_taken(tmp_path, changes, dense, billions):
    """Billions of weights in all, and of those that a token is multiplied by, without the output layer, as its makers
    count them (arXiv:2508.06471, table 1)."""
    spec = read_config(tmp_path, AIR, **changes)
    assert [kind.options.experts is None for kind in spec.kinds] == [n < dense for n in range(spec.layers)]
    assert spec.experts and spec.experts.has_bias and not spec.experts.gates_shared
    assert (spec.rotary_dim, spec.qkv_bias, spec.qk_norm) == (64, True, dense == 3)
    used = spec.count_training_flops([0], 1) / 6 - spec.vocab * spec.hidden
    assert (round(spec.count_weights() / 1e9, 2), round(used / 1e9)) == billions
    VllmConfig(tp=8).check_model(spec)
    MegatronConfig(tp=8, ep=8, ranks=8, dtype="bfloat16", router_bias_rate=1e-3).check_model(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_group 3 and topk_group 1, expected groups of one size, of at least two of the 128 exp"),
        ({"n_group": 128, "topk_group": 8}, "n_group 128 and topk_group 8, expected groups"),
        ({"n_group": 2, "topk_group": 3}, "n_group 2 and topk_group 3, expected groups"),
        ({"n_group": 32}, "n_group 32 and topk_group 1, expected groups .* and 8 experts in topk_group of them"),
        ({"topk_group": 0}, "topk_group 0, expected a whole number of at least 1"),
        ({"n_shared_experts": None}, "n_shared_experts None, expected a whole number of at least 1"),
        ({"first_k_dense_replace": 46}, "first_k_dense_replace 46, expected a whole number below its 46 layers"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor 0, expected a number above 0"),
        ({"tie_word_embeddings": True}, "sets tie_word_embeddings, which the engine does not build"),
        ({"use_qk_norm": 1}, "use_qk_norm 1, expected true or false"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5, expected a number from 0 to 1 that gives an even"),
        ({"partial_rotary_factor": 0.26}, "partial_rotary_factor 0.26, expected a number from 0 to 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor 0, expected a number"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope', expected one of"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129, expected a whole number from 1 to its 128 experts"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, AIR, **changes)


def test_layers_that_predict_further_tokens_are_left_out(make_hf_model, tmp_path):
    """A released folder has one behind the last; what is trained has none, and its config says so."""
    folder, target = tmp_path / "released", tmp_path / "trained"
    shutil.copytree(make_hf_model("glm4_moe", False), folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    further = {"model.layers.4.eh_proj.weight": torch.ones(2, 4), "model.layers.4.enorm.weight": torch.ones(2)}
    save_file(weights | further, folder / "model.safetensors", metadata={"format": "pt"})
    spec = ModelSpec.from_folder(folder)
    check_tensors(SafetensorsFolder(str(folder)), spec)
    save_hf_folder(weights.items(), spec, str(target), 10**9)
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, target)]
    assert configs[1] == configs[0] | {"num_nextn_predict_layers": 0}
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected \['model.layers.3.eh_proj.weight'\]"):
        check_tensors(SafetensorsFolder(str(folder)), spec)


def test_a_saved_bias_stays_in_fp32_and_names_no_type(make_hf_model, tmp_path):
    """It is in fp32 in models of bfloat16, which their config goes on to say."""
    spec = ModelSpec.from_folder(make_hf_model("glm4_moe", False))
    weights = load_file(f"{spec.folder}/model.safetensors")
    assert spec.buffers == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2, 3)}
    rounded = {name: tensor if name in spec.buffers else tensor.bfloat16() for name, tensor in weights.items()}
    save_hf_folder(iter(rounded.items()), spec, str(tmp_path / "saved"), 10**9)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(found[name], rounded[name]) for name in rounded)
    assert {found[name].dtype for name in spec.buffers} == {torch.float32}
    from transformers import AutoModelForCausalLM

    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").named_buffers())
    assert all(torch.equal(loaded[name], weights[name]) for name in spec.buffers)
