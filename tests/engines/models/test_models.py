from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from support.factors import EXPERT_FAMILIES, STATE_EXPERT_FAMILIES, STATE_FAMILIES
from support.models import read_config

from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from hardware import vllm_versions
from hardware.attention.rules import CAUSAL, Rule
from rlworker.checks.reference.huggingface import load_huggingface
from rlworker.config import model_checks
from rlworker.config.model_checks import check_rollout


def test_names_and_shapes_are_those_of_the_saved_model(make_hf_model):
    dense, sparse = ("qwen2", "llama", "qwen3", "mistral", "phi3", *STATE_FAMILIES), EXPERT_FAMILIES
    untied = [(family, False) for family in (*dense, *sparse, *STATE_EXPERT_FAMILIES)]
    for family, tied in (("qwen2", True), *untied):
        spec = ModelSpec.from_folder(make_hf_model(family, tied))
        with safe_open(f"{spec.folder}/model.safetensors", "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {name: spec.find_hf_shape(name) for name in spec.list_hf_names()} == shapes


@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", True), ("qwen3", False), ("qwen3_moe-dense", False), ("qwen2_moe", False), ("glm4_moe", False)],
)
def test_flops_are_those_of_huggingfaces_products(make_hf_model, family, tied):
    """torch counts the products of a forward and backward pass; its attention computes every pair, ours half."""
    from torch.utils.flop_counter import FlopCounterMode

    spec, lengths, counted = ModelSpec.from_folder(make_hf_model(family, tied)), (24, 9), 0
    model = load_huggingface(spec)
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(length)[None] % spec.vocab).logits.sum().backward()
        counted += counter.get_total_flops()
        # Older versions of transformers multiply frequencies and positions as matrices.
        rotary = (count for name, count in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
        counted -= sum(sum(count.values()) for count in rotary)
    pairs = 12 * spec.layers * spec.heads * spec.head_dim * sum(length**2 for length in lengths) / 2
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)  # norms and biases, which are no products
    assert spec.count_training_flops(lengths) + pairs - 6 * vectors * sum(lengths) == counted
    half = spec.count_training_flops(lengths, sum(lengths) / 2)
    assert half == (spec.count_training_flops(lengths) - pairs) / 2 + pairs, "shared tokens are computed once"


def test_rules_follow_layer_types(make_hf_model):
    assert ModelSpec.from_folder(make_hf_model("qwen2", False)).rules == (CAUSAL,)
    windowed = ModelSpec.from_folder(make_hf_model("qwen2-window", False))
    assert windowed.rules == (CAUSAL, CAUSAL, Rule(window=4), Rule(window=4))


def test_configs_of_older_transformers_mean_the_same(make_hf_model, tmp_path):
    """``rope_scaling`` with ``type``, and sliding windows without ``layer_types``."""
    folder = make_hf_model("qwen2", False)
    old = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    spec = read_config(tmp_path, folder, **old)
    assert tuple(spec.ropes[0][key] for key in ("rope_type", "factor", "rope_theta")) == ("linear", 2.0, 500.0)
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "layer_types": None}
    spec = read_config(tmp_path, folder, **window)
    assert spec.rules == (CAUSAL, CAUSAL, CAUSAL, Rule(window=4))
    assert read_config(tmp_path, folder, **window | {"use_sliding_window": False}).rules == (CAUSAL,)
    left_out = read_config(tmp_path, folder, **window | {"sliding_window": ...})
    assert left_out.rules[3] == Rule(window=4096), "transformers' own"
    both = old | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert read_config(tmp_path, folder, **both).ropes[0]["rope_type"] == "linear"


PUBLISHED = {  # as they stand on the hub, further keys of no matter aside
    "Qwen2.5-0.5B": """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}""",
    "Qwen3-0.6B": """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936}""",
    "Llama-3.2-1B": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 128256}""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_taken(tmp_path, name):
    (tmp_path / "config.json").write_text(PUBLISHED[name])
    spec = ModelSpec.from_folder(tmp_path)
    sizes = {"Qwen2.5-0.5B": (14, 2, 64), "Qwen3-0.6B": (16, 8, 128), "Llama-3.2-1B": (32, 8, 64)}
    assert (spec.heads, spec.kv_heads, spec.head_dim) == sizes[name] and spec.rules == (CAUSAL,)
    VllmConfig().check_model(spec)
    MegatronConfig(tp=2, ranks=2).check_model(spec)


def test_the_smallest_length_of_a_config_holds(make_hf_model, tmp_path):
    """vLLM looks at more keys than max_position_embeddings."""
    for changes, length in (({"max_sequence_length": 64}, 64), ({"model_max_length": 512}, 256)):
        assert read_config(tmp_path, make_hf_model("qwen2", False), **changes).max_positions == length


def test_a_missing_folder_and_a_missing_config_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere' does not exist"):
        ModelSpec.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelSpec.from_folder(tmp_path)


REFUSED = {
    "qwen2": [
        ({"model_type": "mamba"}, r"'mamba', expected one of \['gemma3', .*'qwen3_vl_moe'\]; to train .*"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"num_attention_heads": 6}, "num_attention_heads 6, which do not divide its hidden_size 128"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3, which does not divide its 4 heads"),
        ({"head_dim": 64}, "head_dim 64, expected hidden_size / num_attention_heads = 32: vLLM knows no other for"),
        ({"hidden_size": "128"}, "hidden_size '128', expected a whole number"),
        ({"vocab_size": 0}, "vocab_size 0, expected at least 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6', expected a number"),
        ({"rms_norm_eps": 1.5}, "rms_norm_eps 1.5, expected between 0 and 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no', expected true or false"),
        ({"use_sliding_window": 1}, "use_sliding_window 1, expected true or false"),
        ({"bos_token_id": "a"}, "bos_token_id 'a', expected a whole number or null"),
        ({"num_hidden_layers": True}, "num_hidden_layers True, expected a whole number"),
        ({"eos_token_id": ["a"]}, r"eos_token_id \['a'\], expected a whole number or a list \(a whole number\) or"),
        ({"dtype": "float8"}, "dtype 'float8', expected one of 'float32', 'bfloat16', 'float16', 'float64' or null"),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures .*, expected \['Qwen2ForCausalLM'\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "sets quantization_config, which the engine does not build"),
        ({"is_causal": False}, "is_causal False, expected True"),
        ({"layer_types": ["full_attention"]}, "1 layer_types, expected one for each of its 4 layers"),
        ({"layer_types": []}, "0 layer_types, expected one for each of its 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "with 'sliding_attention', but no window: set use_sliding_window"),
        ({"layer_types": ["linear"] * 4}, r"layer_types \['linear'.*expected a list \(one of 'full_att"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_type 'linear' without \['factor'\]"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor 'two', expected a number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta 0, expected a number above 0"),
        ({"rope_parameters": {"rope_type": "linear", "type": "yarn"}}, "rope_type 'linear' and 'yarn', expected one"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rotary settings of their own for 'full_att"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, expected 1"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type 'dynamic'"),
    ],
    "llama": [
        ({"sliding_window": 8}, "sets sliding_window, which the engine does not build"),
        ({"qkv_bias": True}, "sets qkv_bias, which the engine does not build"),
        ({"logit_scale": 0.5}, "logit_scale 0.5, expected 1"),
        ({"hidden_size": 130, "head_dim": 32}, "num_attention_heads 4, which do not divide its hidden_size"),
    ],
    "qwen3": [
        ({"head_dim": None}, "head_dim null, expected a whole number"),
        ({"head_dim": 33}, "head_dim 33, expected an even number"),
    ],
    "qwen3_moe": [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9, expected a whole number from 1 to its 8 experts"),
        ({"num_local_experts": None}, "num_experts None and num_local_experts None, expected one number of experts"),
        ({"num_experts": 4}, "num_experts 4 and num_local_experts 8, expected one number of experts"),
        ({"num_experts": [8], "num_local_experts": [8]}, r"num_experts \[8\], expected a whole number"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size 0, expected a whole number of at least 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1, expected true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0 and mlp_only_layers"),
        ({"decoder_sparse_step": 9}, "has experts in no layer, expected some; lower decoder_sparse_step"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sets use_sliding_window, which the engine does not build"),
    ],
}
"""Family -> changes of its config.json that the engine does not build, and what is said of each."""


@pytest.mark.parametrize(
    ("family", "changes", "message"), [(family, *case) for family, cases in REFUSED.items() for case in cases]
)
def test_what_the_engine_lacks_is_refused(make_hf_model, tmp_path, family, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, make_hf_model(family, False), **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "qwen2"', r"config\.json cannot be read: Expecting ',' delimiter: line 1 column 23"),
        ("", r"config\.json cannot be read: Expecting value"),
        ("[1]", r"config\.json must hold a JSON object, got list"),
        ("[" * 100_000, r"config\.json cannot be read: maximum recursion depth"),
        ('{"model_type": []}', r"model_type \[\], expected one of \['gemma3'"),
        ('{"model_type": "qwen3", "vocab_size": 9, "hidden_size": 8}', r"lacks the keys \['num_hidden.*, 'head_dim'\]"),
    ],
    ids=["cut", "empty", "list", "deep", "type", "keys"],
)
def test_an_unreadable_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen2", dict(tp=3, ranks=3), "tp=3 does not divide the model's 4 attention heads"),
        ("qwen2", dict(pp=3, ranks=3), "pp=3 does not divide the model's 4 layers"),
        ("qwen3_moe", dict(ep=3, ranks=3), "ep=3 does not divide the model's 8 experts; lower --actor.ep"),
        ("qwen3_moe", dict(etp=3, ranks=3), "etp=3 does not divide the model's 32 experts' ffn size"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(make_hf_model, family, settings, message):
    with pytest.raises(ValueError, match=message):
        MegatronConfig(**settings).check_model(ModelSpec.from_folder(make_hf_model(family, False)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tp=2, cp=2, ranks=6), r"tp=2 x pp=1 x cp=2 needs a multiple of 4 ranks, got 6; set --actor.ranks"),
        (
            dict(tp=2, ep=4, etp=2, ranks=4),
            r"pp=1 x ep=4 x etp=2 needs a multiple of 8 ranks, got 4; set --actor.ranks",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MegatronConfig(**settings)


def test_rollout_limits_are_checked(make_hf_model):
    with pytest.raises(ValueError, match="max_model_len=512 is above the model's 256 positions"):
        VllmConfig(max_model_len=512).check_model(ModelSpec.from_folder(make_hf_model("qwen2", False)))
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        VllmConfig(max_new_tokens=64, max_model_len=64)


def test_published_experts_are_taken(tmp_path):
    """Qwen3-30B-A3B as it stands on the hub: all layers have experts, and 3.35 of its 30.5 billion weights are used."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0}
    config |= {"decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048}
    config |= {"intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48}
    config |= {"mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True}
    config |= {"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
    config |= {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": None}
    config |= {"tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}
    spec = read_config(tmp_path, config)
    assert spec.experts and (spec.experts.count, spec.experts.chosen, spec.experts.is_normed) == (128, 8, True)
    assert round(spec.count_weights() / 1e9, 1) == 30.5
    used = spec.count_training_flops([0], 1) / 6 + spec.vocab * spec.hidden  # which are looked up, not multiplied
    assert round(used / 1e9, 2) == 3.35
    VllmConfig(tp=4).check_model(spec)
    MegatronConfig(tp=2, ranks=2, dtype="bfloat16").check_model(spec)


def test_ranks_share_a_head_of_keys_and_values_evenly(make_hf_model):
    """Of 2 heads, 4 ranks have one each; of 3 heads, 4 ranks could not have equal parts."""
    spec = ModelSpec.from_folder(make_hf_model("qwen2", False))
    assert [spec.count_kv_heads(tp) for tp in (1, 2, 4)] == [2, 1, 1]
    MegatronConfig(tp=4, ranks=4).check_model(spec)
    VllmConfig(tp=4).check_cut(spec)
    uneven, message = replace(spec, heads=12, kv_heads=3), "tp=4 is neither a divisor nor a multiple of the model's 3"
    for check in (MegatronConfig(tp=4, ranks=4).check_model, VllmConfig(tp=4).check_cut):
        with pytest.raises(ValueError, match=message):
            check(uneven)


def test_an_actor_without_experts_spreads_none(make_hf_model):
    """A dense reference beside an actor with experts has its ranks, and no experts of its own."""
    dense, spread = ModelSpec.from_folder(make_hf_model("qwen2", False)), MegatronConfig(ep=2, ranks=2)
    spread.check_model(dense)
    with pytest.raises(ValueError, match=r"ep=2 and etp=1 spread experts, and the model has none; leave --actor.ep"):
        spread.check_spread(dense)
    spread.check_spread(ModelSpec.from_folder(make_hf_model("qwen3_moe", False)))
    balanced = MegatronConfig(megatron={"moe_aux_loss_coeff": 0.01})
    with pytest.raises(ValueError, match="has moe_aux_loss_coeff, and the model has no router; leave it out"):
        balanced.check_spread(dense)
    balanced.check_spread(ModelSpec.from_folder(make_hf_model("qwen3_moe", False)))
    for value in (-0.1, "high", True):
        with pytest.raises(ValueError, match=r"moe_aux_loss_coeff .*, expected a number of at least 0"):
            MegatronConfig(megatron={"moe_aux_loss_coeff": value})


def test_routes_are_replayed_where_they_are_recorded(make_hf_model):
    dense, spec = (ModelSpec.from_folder(make_hf_model(name, False)) for name in ("qwen2", "qwen3_moe"))
    config = VllmConfig(replay_routes=True, max_model_len=128, max_new_tokens=8)
    spec = replace(spec, head_dim=64)
    with with_vllm("0.32.0"):
        check_rollout(spec, "cpu", config)
    with pytest.raises(ValueError, match=r"needs a model with experts, and this one has none; leave --rollout.replay"):
        config.check_model(dense)
    uncached = replace(config, vllm={"enable_prefix_caching": False})
    for platform in ("cuda", "npu"):
        with with_vllm("0.32.0"):
            check_rollout(spec, platform, config)
            with pytest.raises(ValueError, match=r"need enable_prefix_caching True, and here it is False; leave --rol"):
                check_rollout(spec, platform, uncached)
        for old in ("0.23.0", "0.26.0"):
            text = rf"replay_routes has no recorder of experts on platform '{platform}' with vLLM {old}; leave"
            with with_vllm(old), pytest.raises(ValueError, match=text):
                check_rollout(spec, platform, config)


@contextmanager
def with_vllm(number: str) -> Iterator[None]:
    """Check settings as if this version of vLLM were installed."""
    with (
        patch.object(vllm_versions, "find_version", lambda: number),
        patch.object(model_checks, "find_version", lambda: number),
    ):
        yield


def test_states_on_an_npu_leave_no_routes_to_replay(make_hf_model):
    """Records need cached prefixes, which these states may not have."""
    spec = replace(ModelSpec.from_folder(make_hf_model("qwen3_next", False)), head_dim=64)
    config = VllmConfig(replay_routes=True, max_model_len=128, max_new_tokens=8, dtype="bfloat16")
    with with_vllm("0.32.0"):
        check_rollout(spec, "cuda", config)
        with pytest.raises(ValueError, match="need enable_prefix_caching True, and here it is False"):
            check_rollout(spec, "npu", config)


def test_experts_of_other_widths_are_refused(make_hf_model):
    """torch's grouped product takes rows of whole multiples of 16 bytes."""
    spec = ModelSpec.from_folder(make_hf_model("qwen3_moe", False))
    narrow = replace(spec.kinds[0].options, experts=replace(spec.experts, ffn=36))
    spec = replace(spec, kinds=tuple(replace(kind, options=narrow) for kind in spec.kinds))
    MegatronConfig().check_model(spec)
    with pytest.raises(
        ValueError, match=r"multiple of 8 columns .* part of an expert has 36; lower --actor.etp or set --actor.dtype"
    ):
        MegatronConfig(dtype="bfloat16").check_model(spec)
    with pytest.raises(ValueError, match=r"float32 needs a multiple of 4 columns .* has 18; lower --actor.etp$"):
        MegatronConfig(etp=2, ranks=2).check_model(spec)
