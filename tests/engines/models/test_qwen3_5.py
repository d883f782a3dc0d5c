"""Qwen3.5's config.json: layers with a state, their sizes, and what is refused by name."""

import json
import math
from pathlib import Path

import pytest
from support.models import read_config

from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from hardware.attention.rules import CAUSAL, Rule
from hardware.megatron.mixers import ATTENTION
from hardware.megatron.mixture import Experts
from hardware.megatron.states.mixer import DeltaNet

CONFIG = json.loads("""{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attention_bias": false,
    "attention_dropout": 0.0, "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "vocab_size": 248320,
    "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
    "rope_theta": 10000000, "rope_type": "default"}, "tie_word_embeddings": false, "use_cache": true}""")
"""A config.json of the sizes that are transformers' defaults, those of Qwen3.5-9B."""
SEEING: dict = json.loads("""{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": false, "vision_config": {"deepstack_visual_indexes": [], "depth": 27, "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
        "model_type": "qwen3_5", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}""")
SEEING["text_config"] = CONFIG | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
"""The whole of one that sees images, as such folders nest it."""


def test_layers_and_sizes(tmp_path):
    spec = read_config(tmp_path, CONFIG)
    assert spec.rules == ((Rule(state=True),) * 3 + (CAUSAL,)) * 8
    assert (spec.rotary_dim, spec.qk_norm, spec.gates_output) == (64, True, True)
    assert set(spec.mixers) == {ATTENTION, DeltaNet(16, 2, 128, 128, 4)}
    assert spec.ropes == ({"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25},)
    assert read_config(tmp_path, CONFIG, full_attention_interval=..., linear_conv_kernel_dim=...).rules == spec.rules
    kinds = ["full_attention", "linear_attention"] * 16
    assert read_config(tmp_path, CONFIG, layer_types=kinds).rules == (CAUSAL, Rule(state=True)) * 16
    MegatronConfig(tp=4, pp=2, cp=2, ranks=16, dtype="bfloat16").check_model(spec)


def test_weights_by_hand(tmp_path):
    """Of a model of one layer of each kind, by transformers' modules."""
    spec = read_config(tmp_path, CONFIG, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    hidden, ffn, mixed, values = 4096, 12288, 2 * 16 * 128 + 32 * 128, 32 * 128
    net = (mixed + values + 32 + 32) * hidden + mixed * 4 + 32 + 32 + 128 + values * hidden
    attention = (2 * 16 + 2 * 4) * 256 * hidden + 16 * 256 * hidden + 2 * 256
    assert spec.count_weights() == net + attention + 2 * (3 * hidden * ffn + 2 * hidden) + hidden + 2 * 248320 * hidden
    cut = {name: weight.cut_shape({"tp": 4}) for name, weight in spec.weights.items() if ".0.self_attention." in name}
    assert {name.rpartition("self_attention.")[2]: shape for name, shape in cut.items()} == {
        "conv": (mixed // 4, 1, 4),
        "a_log": (8,),
        "dt_bias": (8,),
        "out_norm": (128,),
        "in_proj.weight": ((mixed + values + 64) // 4, hidden),
        "out_proj.weight": (hidden, values // 4),
    }


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
EXPERTS |= {"shared_expert_intermediate_size": 256}
MOE = EXPERTS | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
NEXT = EXPERTS | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "norm_topk_prob": True}


def test_experts_beside_states(tmp_path):
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    spec = read_config(tmp_path, CONFIG, **MOE, **kinds, intermediate_size=...)
    assert [kind.options.experts for kind in spec.kinds] == [Experts(8, 2, 512, True, shared=256)] * 2
    assert [mixer != ATTENTION for mixer in spec.mixers] == [True, False] and spec.mlp_widths.keys() == {
        "shared expert's ffn size"
    }
    dense = read_config(tmp_path, CONFIG, **NEXT, **kinds, mlp_only_layers=[0])
    assert [bool(kind.options.experts) for kind in dense.kinds] == [False, True]
    shapes = {
        name.rpartition("attn.")[2]: dense.find_hf_shape(name) for name in dense.list_hf_names() if ".in_" in name
    }
    assert shapes == {"in_proj_qkvz.weight": (2 * 2048 + 2 * 4096, 4096), "in_proj_ba.weight": (64, 4096)}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob False, expected true, as transformers computes"),
        (MOE, {"mlp_only_layers": [0]}, "sets mlp_only_layers, which the engine does not build"),
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok 9, expected a whole number from 1 to its 8 experts"),
        (NEXT, {"layer_types": ["linear_attention"] * 32}, "layer_types of linear_attention alone"),
        (NEXT, {"tie_word_embeddings": True}, "sets tie_word_embeddings, which the engine does not build"),
        (NEXT, {"decoder_sparse_step": 33}, "experts in no layer"),
        (NEXT, {"shared_expert_intermediate_size": ...}, "lacks the keys .'shared_expert_intermediate_size'"),
    ],
)
def test_of_families_with_experts_what_is_not_built_is_refused(tmp_path, family, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, CONFIG, **(family | changes))


def test_flops_by_hand(tmp_path):
    """Attention's pairs in one layer; in the other three products of 128 x 128 numbers for each head and token."""
    spec = read_config(tmp_path, CONFIG, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    lengths, weights = (30, 12), spec.count_weights() - 248320 * 4096
    pairs, states = 12 * 16 * 256 * (30**2 + 12**2) / 2, 3 * 2 * 3 * 32 * 128 * 128 * 42
    assert spec.count_training_flops(lengths) == 6 * weights * 42 + pairs + states


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24, expected a multiple of its 16 linear_num_key_hea"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim 0, expected a whole number of at least 1"),
        ({"linear_num_key_heads": ...}, "lacks the keys .'linear_num_key_heads'"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim 5, expected at most 4"),
        ({"full_attention_interval": 0}, "full_attention_interval 0, expected a whole number of at least 1"),
        ({"layer_types": ["linear_attention"] * 3}, "3 layer_types, expected one for each of its 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types of linear_attention alone, expected full_att"),
        ({"layer_types": ["sliding_attention"] * 32}, r"layer_types .* expected a list .*'full_attention', 'linear_"),
        ({"head_dim": None}, "has head_dim null, expected a whole number"),
        ({"attn_output_gate": False}, "attn_output_gate False, expected True, as transformers computes"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid', expected 'silu' or 'swish', as transformers"),
        ({"attention_bias": True}, "sets attention_bias, which the engine does not build"),
        ({"rope_parameters": {"partial_rotary_factor": 0.255}}, "partial_rotary_factor 0.255, expected a number"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"expected \['Qwen3_5ForCausalLM'\]"),
    ],
    ids=range(14),
)
def test_what_is_not_built_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, CONFIG, **changes)


def test_other_families_have_no_states(tmp_path):
    with pytest.raises(ValueError, match=r"layer_types .* expected a list .*'full_attention', 'sliding_att"):
        read_config(tmp_path, CONFIG, model_type="qwen3", layer_types=["linear_attention"] * 32)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"linear_num_key_heads": 2}, 4, "tp=4 does not divide the model's 2 key heads of layers with a state"),
        ({}, 8, "tp=8 is above the model's 4 key-value heads, which Megatron does not share .* outputs have gates"),
    ],
    ids=["key heads", "key-value heads"],
)
def test_tensor_parallel_sizes_that_are_not_built(tmp_path, changes, tp, message):
    with pytest.raises(ValueError, match=message):
        MegatronConfig(tp=tp, ranks=tp).check_model(read_config(tmp_path, CONFIG, **changes))


def test_a_rollout_that_cannot_be_cut(tmp_path):
    spec = read_config(tmp_path, CONFIG, linear_num_key_heads=2, num_key_value_heads=4)
    VllmConfig(tp=2).check_model(spec)
    with pytest.raises(
        ValueError, match="rollout: tp=4 does not divide the model's 2 key heads of layers with a state"
    ):
        VllmConfig(tp=4).check_model(spec)


# -- with images


def read_seeing(folder: Path, **changes) -> ModelSpec:
    """Read ``SEEING`` with other settings of a part, ``text`` or ``vision``."""
    parts = {f"{part}_config": SEEING[f"{part}_config"] | change for part, change in changes.items()}
    return read_config(folder, SEEING, **parts)


def test_what_sees_is_the_language_model_with_a_tower(tmp_path):
    """Of the same weights, one folder further in; a tower without features of inner layers; three axes of a quarter of
    a head."""
    spec, text = read_seeing(tmp_path), read_config(tmp_path, CONFIG)
    tower = sum(
        math.prod(spec.find_hf_shape(name)) for name in spec.list_hf_names() if name.startswith("model.visual.")
    )
    assert spec.count_weights() - tower == text.count_weights() and tower == 456_010_480
    inner = {name.replace("model.", "model.language_model.", 1) for name in text.list_hf_names() - {"lm_head.weight"}}
    assert inner | {"lm_head.weight"} == {n for n in spec.list_hf_names() if not n.startswith("model.visual.")}
    assert (spec.rules, spec.rotary_dim, spec.vision.deepstack) == (text.rules, 64, 0)
    assert [spec.vision.axes.count(axis) for axis in range(3)] == [11, 11, 10]
    assert spec.vision.axes[:6] == (0, 1, 2) * 2 and spec.vision.axes[-2:] == (0, 1)


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"])
def test_a_released_dense_model_of_27_billion_weights(tmp_path, name):
    """Three releases of one architecture, named on the page with their sources."""
    sizes = {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_hidden_layers": 64}
    sizes |= {"linear_num_value_heads": 48, "output_gate_type": "swish"}
    spec = read_seeing(tmp_path, text=sizes, vision={"out_hidden_size": 5120})
    assert spec.count_weights() / 1e9 == pytest.approx(27.4, rel=5e-3)
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert f"| {name} |" in page.partition("## Released models of Qwen3.5")[2].partition("\n## ")[0]


def test_a_tower_is_built_from_settings_as_released(tmp_path):
    """They name a kind of tower that transformers does not know, and a list of no inner layers."""
    import torch

    from engines.megatron.vision.towers import QwenTower

    small = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    vision = read_seeing(tmp_path, vision=small, text={"hidden_size": 64}).vision
    tower = QwenTower.build(vision, torch.float32)
    names = {f"vision.{name}": tuple(tensor.shape) for name, tensor in tower.named_parameters()}
    assert names == {weight.name: next(iter(weight.tensors.values())) for weight in vision.weights()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": {"deepstack_visual_indexes": [8]}}, r"deepstack_visual_indexes \[8\], expected none"),
        ({"vision": {"out_hidden_size": 2048}}, "out_hidden_size 2048, expected hidden_size 4096"),
        ({"text": {"rope_parameters": CONFIG["rope_parameters"] | {"mrope_interleaved": False}}}, "expected True: tra"),
        (
            {"text": {"rope_parameters": CONFIG["rope_parameters"] | {"partial_rotary_factor": 0.5}}},
            "expected 64, half",
        ),
        ({"text": {"rope_parameters": CONFIG["rope_parameters"] | {"rope_type": "yarn"}}}, "scaled rotary embeddings"),
        ({"text": {"attn_output_gate": False}}, "attn_output_gate False, expected True"),
    ],
    ids=range(6),
)
def test_what_is_not_built_of_images_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_seeing(tmp_path, **changes)
