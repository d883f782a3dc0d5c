"""Text families in vLLM: logprobs of what was sampled against HuggingFace, before and after a weight sync."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.cover import in_runs
from support.factors import FAMILIES, STATE_EXPERT_FAMILIES, STATE_FAMILIES
from support.huggingface import load_folder, measure_differences, move_weights, name_weights
from support.models import LANGUAGE_MODELS, VOCAB
from support.rollout_workers import Prompt, draw, find_unlike, send, start_engine

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.models import make_tiny_text

pytestmark = pytest.mark.usefixtures("by_value")
CONFIG = VllmConfig(max_new_tokens=8, max_model_len=64, max_num_seqs=64, kv_cache_mb=64)
PROMPTS = [Prompt(tuple(range(20, 20 + length))) for length in (3, 17, 40)]
SAMPLING = Sampling(4, 1.0, 8, (1,), (2, 11, 12, 13))
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOWED = {
    "gemma3_text": {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": {},
    "mixtral": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
}
"""Families that are given a window of 6, and what else they need for it."""

OF_EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", *STATE_EXPERT_FAMILIES)
IN_CI = ("gemma3_text", "mistral", "phi3", "glm4_moe", "qwen3_next")
"""A window on some layers, shards, fused layers, and experts: chosen with a bias, and beside states. Other tests sample
from Qwen2, Llama, Qwen3-MoE and Qwen3.5."""
REST = [family for family in (*FAMILIES, *OF_EXPERTS, *STATE_FAMILIES) if family not in IN_CI]


@pytest.mark.parametrize("family", in_runs(large=IN_CI, product=REST))
def test_logprobs_before_and_after_a_sync(cluster, tmp_path, measured, family):
    """Prompts of several windows, where layers have one."""
    settings = ENDS | ({"sliding_window": 6} | WINDOWED[family] if family in WINDOWED else {})
    if family in OF_EXPERTS + STATE_FAMILIES:
        settings = LANGUAGE_MODELS[family][1] | settings
    if family in ("qwen3", "qwen3_moe", "glm4_moe"):
        settings |= {"head_dim": 64}  # not hidden / heads
    folder = make_tiny_text(tmp_path / "model", family, VOCAB, tied=False, **settings)
    if family == "mistral":  # as the hub has it: in shards, and once more in its maker's own form, which vLLM prefers
        load_folder(folder).save_pretrained(folder, max_shard_size=100_000)
        Path(folder, "model.safetensors").unlink()
        for name in ("consolidated.safetensors", "params.json"):
            Path(folder, name).write_text("not to be read")
    spec, old = ModelSpec.from_folder(folder), load_folder(folder)
    new = move_weights(load_folder(folder), spec)
    first, then = name_weights(old, spec), name_weights(new, spec)
    with start_engine(spec, CONFIG) as worker:
        before = draw(worker, PROMPTS, SAMPLING)
        send(worker, then.items(), 20_000)
        after = draw(worker, PROMPTS, SAMPLING)
        assert find_unlike(worker, then.items()) == set()
    with start_engine(spec, replace(CONFIG, dtype="bfloat16")) as worker:  # in the same process
        send(worker, first.items())
        rounded = measure_differences(old, PROMPTS, draw(worker, PROMPTS, SAMPLING))
        measured({"bfloat16, mean": float(rounded.mean())})
        # An expert that rounding chooses otherwise moves a token by more than rounding does.
        assert family in OF_EXPERTS or rounded.mean() <= 0.05
        assert find_unlike(worker, first.items(), dtype="bfloat16") == set()
        assert find_unlike(worker, then.items(), columns=4, dtype="bfloat16") == {*then}
    for label, model, completions in (("before", old, before), ("after", new, after)):
        found = measure_differences(model, PROMPTS, completions)
        measured({label: float(found.max())})
        assert found.mean() <= 2e-6 and found.max() <= 1e-4
    assert measure_differences(old, PROMPTS, after).max() > 0.1, "the test can tell old weights from new"
    if family in WINDOWED:
        new.config.sliding_window = 1000
        for layer in new.model.layers:
            layer.self_attn.sliding_window = None
        assert measure_differences(new, PROMPTS, after).max() > 1e-2, "the test can tell a window from none"
