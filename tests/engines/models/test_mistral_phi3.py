"""Mistral and Phi-3: what sets them apart from Llama, and which of their switches are refused by name."""

import pytest
import torch
from support.models import read_config

from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.attention.rules import CAUSAL, Rule


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_one_window_for_all_layers_or_none(make_hf_model, tmp_path, family):
    folder = make_hf_model(family, False)
    for window, rule in ((7, Rule(window=7)), (None, CAUSAL)):
        spec = read_config(tmp_path, folder, sliding_window=window)
        assert spec.rules == (rule,)
        VllmConfig(max_new_tokens=8, max_model_len=64).check_model(spec)  # which refuses windows on some layers alone


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_configs_of_older_transformers_mean_the_same(make_hf_model, tmp_path, family):
    old = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0}
    spec = read_config(tmp_path, make_hf_model(family, False), **old)
    assert spec.ropes == ({"rope_type": "default", "rope_theta": 500.0},)


LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("phi3", {"rope_parameters": {"rope_type": "longrope", **LONGROPE}}, "'longrope', expected 'default'"),
        ("phi3", {"rope_scaling": {"type": "su", **LONGROPE}}, "rope_type 'su', expected 'default'"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear', expected 'default'"),
        ("mistral", {"rope_parameters": {"rope_type": "longrope", **LONGROPE}}, "'longrope', expected one of"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor 0.75, expected 1"),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "0.5, expected 1: the engine turns whole"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop, which the engine does not build; turn it off or leave it out"),
        ("phi3", {"embd_pdrop": 0.1}, "sets embd_pdrop"),
        ("phi3", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("phi3", {"attention_bias": True}, "sets attention_bias"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'silu'"),
        ("phi3", {"layer_types": ["full_attention"] * 4}, "sets layer_types"),
        ("mistral", {"layer_types": ["sliding_attention"] * 4}, "sets layer_types"),
        ("mistral", {"llama_4_scaling": {"beta": 0.1}}, "sets llama_4_scaling"),
        ("mistral", {"mlp_bias": True}, "sets mlp_bias"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0, expected at least 1"),
        ("mistral", {"architectures": ["LlamaForCausalLM"]}, r"expected \['MistralForCausalLM'\]"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(make_hf_model, tmp_path, family, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, make_hf_model(family, False), **changes)


@pytest.mark.parametrize("key", ["sliding_window", "num_key_value_heads"])
def test_what_transformers_would_make_up_for_mistral_must_be_said(make_hf_model, tmp_path, key):
    with pytest.raises(ValueError, match=rf"lacks the keys \['{key}'\]"):
        read_config(tmp_path, make_hf_model("mistral", False), **{key: ...})


def test_fused_projections_are_regrouped_by_hand(make_hf_model):
    """Heads q0 to q3 read keys k0, k0, k1, k1: Megatron's rows are q0 q1 k0 v0, then q2 q3 k1 v1, of 32 each."""
    model = ModelSpec.from_folder(make_hf_model("phi3", False))
    assert (model.heads, model.kv_heads, model.head_dim) == (4, 2, 32)
    weight = model.find_weight("decoder.layers.0.self_attention.linear_qkv.weight")
    ((name, shape),) = weight.tensors.items()
    assert (name, shape) == ("model.layers.0.self_attn.qkv_proj.weight", (256, 128))
    saved = torch.arange(256)[:, None].expand(shape)  # a row's number in the folder
    joined = weight.join.join([saved])
    heads = {"q0": 0, "q1": 32, "q2": 64, "q3": 96, "k0": 128, "k1": 160, "v0": 192, "v1": 224}
    by_hand = [heads[head] for head in ("q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1")]
    assert joined[::32, 0].tolist() == by_hand and joined[1::32, 0].tolist() == [row + 1 for row in by_hand]
    (back,) = weight.split(joined).values()
    assert torch.equal(back, saved)
