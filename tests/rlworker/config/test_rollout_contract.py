"""What a model's rules ask of the machine that rolls out is answered before anything starts."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.program import run_program

from engines.config import MegatronConfig, VllmConfig
from engines.config.rollout import find_weight_way
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from rlworker.__main__ import main
from rlworker.checks.tiny.models import (
    LARGE_WEIGHTS,
    make_bare_tokenizer,
    make_tiny_model,
    make_tiny_text,
    make_tiny_vlm,
)
from rlworker.config.model_checks import check_engines
from rlworker.config.run import RunConfig
from rlworker.config.sections import PlacementConfig
from rlworker.tracking.report.page import write_report

ROLLOUT = VllmConfig(max_new_tokens=8, max_model_len=64, max_num_seqs=16, kv_cache_mb=256)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.mark.parametrize("platform", ["cpu", "cuda-emulated", "npu-emulated", "cuda"])
def test_images_both_ways_where_they_are_honoured(gemma, platform):
    layout = "bshd" if "npu" in platform else "thd"
    check_engines(gemma, platform, MegatronConfig(layout=layout), ROLLOUT)


def test_images_both_ways_where_they_are_not(tmp_path):
    sizes = LARGE_WEIGHTS | {"head_dim": 64}  # one that vllm-ascend knows
    folder = make_tiny_vlm(tmp_path, "gemma3", make_bare_tokenizer(), 131, language=sizes)
    actor = MegatronConfig(layout="bshd")
    with pytest.raises(ValueError, match=r"vllm_ascend/images is refused: .*nearest: .*--rollout.attention-override"):
        check_engines(folder, "npu", actor, ROLLOUT)
    check_engines(folder, "npu", actor, replace(ROLLOUT, attention_override=("vllm_ascend/images",)))


def test_an_override_of_another_machine_does_nothing(gemma):
    rollout = replace(ROLLOUT, attention_override=("vllm_ascend/images",))
    with pytest.raises(ValueError, match=r"attention_override \['vllm_ascend/images'\] does nothing.*vllm_cpu_images"):
        check_engines(gemma, "cpu", MegatronConfig(), rollout)


@pytest.mark.parametrize("backend", ["vllm_cpu", "vllm_cpu_images"])
def test_an_override_does_not_bring_back_the_kernel_of_states(backend):
    with pytest.raises(ValueError, match=f"{backend}/state' does nothing: .*nearest: vllm_cpu_states, which is taken"):
        replace(ROLLOUT, attention_override=(f"{backend}/state",))


def test_states_on_ascend_are_allowed_as_untested_and_said_so(tmp_path):
    from rlworker.trainers.run_processes import list_warnings

    folder = make_tiny_model(tmp_path, "qwen3_5_text", head_dims=(64,))
    with pytest.raises(ValueError, match=r"vllm_ascend/state: .* --rollout.dtype is float32, expected bfloat16"):
        check_engines(folder, "npu", MegatronConfig(), ROLLOUT)
    rollout = replace(ROLLOUT, dtype="bfloat16")
    model = check_engines(folder, "npu", MegatronConfig(), rollout)
    config = RunConfig(model=folder, platform="npu", rollout=replace(rollout, max_model_len=2048))
    assert [w for w in list_warnings(config, model) if "vllm_ascend/state is untested" in w]
    on_cpu = replace(config, platform="npu-emulated")
    assert not [w for w in list_warnings(on_cpu, model) if "untested" in w]


@pytest.mark.large  # it imports vLLM
def test_vllm_gets_the_arguments_that_states_on_ascend_need(tmp_path):
    from engines.vllm import engine

    started = []

    def start(**arguments):
        started.append(arguments)
        raise InterruptedError

    for kind in ("qwen3_5_text", "qwen2"):
        model = ModelSpec.from_folder(make_tiny_model(tmp_path / kind, kind, head_dims=(64,)))
        with patch.object(engine, "LLM", start), pytest.raises(InterruptedError):
            engine.VllmEngine(model, replace(ROLLOUT, dtype="bfloat16"), get_platform("npu"))
    of_states, plain = started
    assert (of_states["enable_prefix_caching"], of_states["enforce_eager"]) == (False, True)
    assert "enable_prefix_caching" not in plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens 63 is below --rollout.max-model-len 64"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill would cut images"),
        ({"long_prefill_token_threshold": 32}, "long_prefill_token_threshold 32 would cut images"),
    ],
)
def test_prompts_are_computed_whole(gemma, tmp_path, settings, message):
    """A text model's may be cut."""
    rollout = replace(ROLLOUT, vllm=settings)
    with pytest.raises(ValueError, match=message):
        check_engines(gemma, "cpu", MegatronConfig(), rollout)
    check_engines(make_tiny_text(tmp_path, "qwen2", 99), "cpu", MegatronConfig(), rollout)


def test_mixed_windows_are_vllms_to_know(tmp_path):
    windows = dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)
    with pytest.raises(ValueError, match=r"sliding_window on some layers and none on others.* qwen2;"):
        check_engines(make_tiny_text(tmp_path / "qwen2", "qwen2", 99, **windows), "cpu", MegatronConfig(), ROLLOUT)
    kinds = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=4, head_dim=32)
    check_engines(make_tiny_text(tmp_path / "gemma", "gemma3_text", 99, **kinds), "cpu", MegatronConfig(), ROLLOUT)


def test_a_report_names_what_was_approximate(tmp_path):
    stored = {"platform": "cpu", "rollout": {"attention_override": ["vllm_cpu/images"]}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5, "approximate_rules": 1}) + "\n")
    page = write_report(tmp_path).read_text()
    assert "approximate: vllm_cpu/images" in page


@pytest.mark.parametrize(
    ("platform", "colocated", "ways"),
    [
        ("cpu", False, ["host", "gloo"]),
        ("cuda-emulated", True, ["host", "gloo"]),
        ("cuda", False, ["nccl", "host"]),
        ("cuda", True, ["ipc", "host"]),
        ("npu", True, ["host"]),
    ],
)
def test_weights_travel_by_the_ways_that_a_platform_has(platform, colocated, ways):
    found = [
        find_weight_way(replace(ROLLOUT, weight_transfer=way), get_platform(platform), colocated)
        for way in ("auto", *ways)
    ]
    assert found == [ways[0], *ways]
    other = "nccl" if colocated else "ipc"
    named = f"weight_transfer='{other}' is no way of weights on platform '{platform}'.*--rollout.weight-transfer"
    with pytest.raises(ValueError, match=named):
        find_weight_way(replace(ROLLOUT, weight_transfer=other), get_platform(platform), colocated)


def test_a_way_that_a_run_cannot_take_is_refused_with_its_settings():
    with pytest.raises(ValueError, match=r"'ipc' is no way of weights on platform 'cuda' without placement\.colocate"):
        RunConfig(platform="cuda", rollout=VllmConfig(weight_transfer="ipc"))
    RunConfig(platform="cuda", rollout=VllmConfig(weight_transfer="ipc"), placement=PlacementConfig(colocate=True))


@pytest.mark.parametrize("tiny", ["qwen2", "qwen2_5_vl"])
def test_a_check_without_a_folder_makes_a_model_that_its_platform_takes(monkeypatch, tiny):
    """An NPU's rollouts know no heads of 32; the model's are then of 64."""
    import rlworker.checks.check

    specs = []
    monkeypatch.setattr(
        rlworker.checks.check, "run_check", lambda config, tell: specs.append(config.check_model()) or []
    )
    for platform in ("npu", "cpu"):
        done = run_program(main, "check", "--platform", platform, "--tiny", tiny)
        assert done.returncode == 0, done.stderr
    assert [spec.head_dim for spec in specs] == [64, 32]
