"""``rlworker check`` on the real engines, and the faults that it must find."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.cover import in_runs
from support.factors import PLATFORMS
from support.models import write_config
from support.program import run_program

from engines.batch.beginnings import find_beginnings
from engines.config import LoraConfig, MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from engines.probes.case import Influence
from engines.probes.faults import ADAPTER_FAULTS, FAULTS, list_real_faults
from hardware.platforms import get_platform
from rlworker import __main__ as cli
from rlworker.base.findings import Finding
from rlworker.checks.case import make_case
from rlworker.checks.config import CheckConfig
from rlworker.checks.tiny.models import make_tiny_model
from rlworker.checks.trainer import _describe_influences


@pytest.mark.parametrize("ranks", in_runs(default=[2], product=[4]))
def test_the_clean_path_passes_at_the_asked_sizes(cluster, make_hf_model, ranks):
    """A user's model over two pipeline stages, and two replicas of them, with a pack of a fixed size, and samples from
    the likeliest ids alone."""
    from rlworker.checks.check import run_check

    config = CheckConfig(
        model=make_hf_model("llama", False),
        actor=MegatronConfig(ranks=ranks, pp=2, pad_to_multiple_of=2, slots=128),
    )
    told = []
    found = run_check(replace(config, rollout=replace(config.rollout, top_k=20)), told.append)
    assert {(finding.outcome, finding.evidence) for finding in found} == {("ok", "executed")}
    checks = [finding.check for finding in found]
    assert [checks.count(name) for name in dict.fromkeys(checks)] == [14, 2, 3, 2, 1, 3]
    assert list(dict.fromkeys(checks)) == ["attention", "tokens", "layouts", "gradients", "rollout", "weight sync"]
    begun = list(dict.fromkeys(line.split(":")[0] for line in told))
    draws = [f"HuggingFace, float32, draw {draw} of 4" for draw in range(1, 5)]
    assert begun == ["HuggingFace, float64", *draws, "engines start", *dict.fromkeys(checks)]
    lines = {finding.check: finding.text for finding in found}
    assert "(HuggingFace " in lines["layouts"] and "(HuggingFace " in lines["gradients"]
    moved = re.fullmatch(r"logprobs moved by (\S+) on average, expected (\S+)", lines["weight sync"])
    assert float(moved[1]) >= float(moved[2]) >= 100 * 2e-5, "a step away, and not a little"


@pytest.mark.large
def test_a_rank_that_dies_is_named(cluster, make_hf_model):
    """The other rank waits for it in a collective, and may tell of a lost connection first."""
    import ray

    from rlworker.checks.check import check_all
    from rlworker.checks.context import start_engines

    def kill_a_rank(told: str) -> None:
        if told == "gradients: thd":
            os.kill(pids[1], signal.SIGKILL)

    config = CheckConfig(model=make_hf_model("llama", False), actor=MegatronConfig(ranks=2, tp=2))
    with start_engines(config, kill_a_rank) as engines:
        pids = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in engines.actor.workers])
        findings = check_all(engines, version=1, only=("gradients",))
    assert [finding.outcome for finding in findings] == ["FAILED"]
    assert findings[0].text.startswith("raised: actor rank 1 died"), findings[0].text


@pytest.mark.parametrize(
    ("tiny", "sizes"),
    in_runs(
        large=[("gemma3", MegatronConfig(ranks=2, cp=2))],
        product=[
            ("qwen2_5_vl", MegatronConfig(ranks=2, pp=2)),
            ("qwen3_vl", MegatronConfig(ranks=4, cp=2, tp=2)),
            ("qwen3_5", MegatronConfig(ranks=4, cp=2, tp=2)),
            ("qwen2_5_vl", MegatronConfig(ranks=2, tp=2)),
            ("qwen3_vl", MegatronConfig(ranks=2)),
        ],
    ),
)
def test_a_model_that_sees_images_passes(cluster, tmp_path, tiny, sizes):
    from rlworker.checks.check import run_check

    found = run_check(CheckConfig(model=make_tiny_model(tmp_path, tiny), actor=sizes), print)
    assert {finding.outcome for finding in found if finding.check != "attention"} == {"ok"}, found
    images = [finding.where for finding in found if finding.check == "images"]
    assert images == ["bshd, whole model", "thd, whole model", "tower"]


ADAPTED = ("--actor.lora.rank", "4")


@pytest.mark.parametrize(
    ("tiny", "dtype", "size"),
    in_runs(
        large=[("qwen3_moe", "float32", {"ep": 2})],
        product=[("qwen2", "float32", {"tp": 2}), ("qwen2", "bfloat16", {"tp": 2})],
    ),
)
def test_adapters_pass_at_two_ranks(cluster, tmp_path, tiny, dtype, size):
    from rlworker.checks.check import run_check

    targets = ("attention", "mlp", "experts") if tiny == "qwen3_moe" else ("attention", "mlp")
    actor = MegatronConfig(ranks=2, **size, dtype=dtype, lora=LoraConfig(rank=4, targets=targets))
    rollout = replace(CheckConfig().rollout, dtype=dtype)
    found = run_check(CheckConfig(model=make_tiny_model(tmp_path, tiny), actor=actor, rollout=rollout), print)
    assert {finding.outcome for finding in found} == {"ok"}, found
    lines = {(finding.check, finding.where): finding.text for finding in found}
    assert "lora_" in lines["gradients", "thd against HuggingFace"]
    merged = re.search(r"logprob mean (\S+)", lines["merge", "thd, adapters in the weights"])
    assert merged and float(merged[1]) > (1e-4 if dtype == "bfloat16" else 1e-8)


@pytest.mark.product
def test_faults_of_adapters_are_found(cluster):
    command = [Path(sys.executable).parent / "rlworker", "check", "--json", "--self-test", *ADAPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    found = {finding["where"]: finding for finding in json.loads(done.stdout) if finding["check"] == "fault"}
    assert done.returncode == 0 and set(found) == set(ADAPTER_FAULTS), done.stderr
    for name, finding in found.items():
        assert finding["outcome"] == "ok" and finding["text"].startswith(ADAPTER_FAULTS[name].found_by), finding
    assert "sent without their adapters" in found["frozen weights"]["text"]


FEW_FAULTS = ("whole-buffer causal", "padding seen", "the label of a neighbour", "a column shifted", "stale weights")


@pytest.mark.large
@pytest.mark.timeout(400)
def test_faults_of_fused_experts_are_found(cluster, monkeypatch, tmp_path):
    """One changes what is sent, which logprobs tell, the other what is loaded, which is read back."""
    from rlworker.checks import self_test

    monkeypatch.setattr(self_test, "running_ray", lambda *_: nullcontext())
    found = self_test.run_self_test(CheckConfig(tiny="qwen3_5_moe", self_test=True), str(tmp_path), print)
    assert {finding.outcome for finding in found} == {"ok"}, found
    faults = {finding.where: finding.text for finding in found if finding.check == "fault"}
    assert set(faults) == {"gate and up of fused experts exchanged", "rows of a fused expert shifted"}
    assert "weight sync, after new weights" in faults["gate and up of fused experts exchanged"]
    assert re.search(r"read back: 1 of \d+ tensors are not those", faults["rows of a fused expert shifted"])


def test_a_self_test_of_a_tiny_model_without_faults_is_refused(tmp_path):
    from rlworker.checks.self_test import run_self_test

    config = CheckConfig(tiny="mistral", self_test=True)
    with pytest.raises(ValueError, match=r"planted into a tiny mistral, expected one of \['gemma3', .*'qwen3_5_moe', "):
        run_self_test(config, str(tmp_path), print)


@pytest.mark.large
def test_planted_faults_are_found(cluster, monkeypatch, tmp_path):
    """Of each check on one rank of a dense model; all faults are planted by hand."""
    from rlworker.checks import self_test

    monkeypatch.setattr(self_test, "running_ray", lambda *_: nullcontext())
    monkeypatch.setattr(self_test, "FAULTS", {name: FAULTS[name] for name in FEW_FAULTS})
    found = self_test.run_self_test(CheckConfig(self_test=True), str(tmp_path), print)
    faults = {finding.where: finding for finding in found if finding.check == "fault"}
    assert set(faults) == set(FEW_FAULTS) and {finding.outcome for finding in found} == {"ok"}, found
    assert all(finding.text.startswith(FAULTS[name].found_by) for name, finding in faults.items()), found
    assert "see a neighbour in the pack" in faults["whole-buffer causal"].text
    assert "see padding" in faults["padding seen"].text
    assert re.search(r"\d+ of \d+ tensors are not those that were sent", faults["stale weights"].text)


@pytest.mark.product
@pytest.mark.timeout(820)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_planted_fault_is_found_and_the_clean_path_is_silent(platform):
    command = [Path(sys.executable).parent / "rlworker", "check", "--json", "--self-test", "--platform", platform]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.stdout.startswith("["), done.stderr
    found = json.loads(done.stdout)
    by_name = {finding["where"]: finding for finding in found if finding["check"] == "fault"}
    assert done.returncode == 0 and set(by_name) == set(FAULTS) and len(FAULTS) >= 12
    for name, finding in by_name.items():
        assert finding["outcome"] == "ok" and finding["text"].startswith(FAULTS[name].found_by), finding
        assert "raised" not in finding["text"], "found by its numbers, not because something fell over"
    clean = [finding for finding in found if finding["check"] == "no fault"]
    models = [f"{name}, one rank" for name in ("qwen2", "qwen3_vl", "gemma3", "qwen3_5_text")]
    models = [models[0], "qwen2, cp=2", *models[1:], "qwen2_moe, ep=2", "qwen3_5_moe, ep=2", "glm4_moe, etp=2"]
    assert [finding["where"] for finding in clean] == models
    if platform != "cpu":
        not_covered = {"cuda-emulated": "the precision of the device's", "npu-emulated": "pse"}[platform]
        assert found[-1]["evidence"] == "emulated" and f"says nothing about {not_covered}" in found[-1]["text"]
    words = {name: finding["text"] for name, finding in by_name.items()}
    assert "see a neighbour in the pack" in words["whole-buffer causal"]
    assert "see the future" in words["None where None means full"]
    assert "see outside the window" in words["window off by one"]
    assert "links missing" in words["causal where the image rule was asked"]
    assert "see padding" in words["padding seen"]
    assert "see a neighbour in the pack" in words["states run on"]
    assert "layer 3 of 4 is the first to differ" in words["a layer that computes otherwise"]
    assert "all 4 layers agree: what differs is the output layer or its targets" in words["the label of a neighbour"]
    assert "layer 1 of 4 is the first to differ" in words["rotation from the wrong positions"]
    assert re.search(r"bshd, tokens routed: \d+ tokens chose experts, expected \d+", words["padding routed"])
    assert "4 of 154 tensors are not those that were sent" in words["routers left out of a sync"], "one of each layer"
    assert re.search(r"; [1-9]\d* tokens without routes", words["cached tokens without routes"])
    assert "; 0 tokens without routes" in words["routes of the layer before"]


def test_a_failed_check_is_the_exit_status(monkeypatch, capsys):
    from rlworker.checks import check

    failed = Finding("attention", "thd, causal", "FAILED", "3 pairs see the future", "executed")
    refused = Finding("attention", "thd, images", "refused", "no backend", "table")
    for found, status in (([failed, refused], 1), ([refused], 0)):
        monkeypatch.setattr(check, "run_check", lambda config, tell, found=found: found)
        with pytest.raises(SystemExit) as ended:
            cli.check(CheckConfig())
        assert ended.value.code == status
    assert "attention  thd, causal  FAILED   executed  3 pairs see the future" in capsys.readouterr().out


def test_a_fault_is_told_in_words():
    influences = [
        Influence(3, {"the future": 2}, 0, "sequence 0 at 1 sees sequence 0 at 2"),
        Influence(2, {"a neighbour in the pack": 4}, 1, "sequence 1 at 0 sees sequence 0 at 0"),
    ]
    assert _describe_influences(influences) == (
        "from layer 2 on: 4 pairs see a neighbour in the pack, 1 links missing; sequence 1 at 0 sees sequence 0 at 0"
    )


def test_the_case_is_longer_than_the_window_and_within_the_positions(make_hf_model, tmp_path):
    case = make_case(ModelSpec.from_folder(make_hf_model("qwen2-window", False)), 3, str(tmp_path))
    assert all(part.num_tokens for part in case.batch.split(3)), "every replica has its share"
    assert max(case.batch.lengths) >= 4 + 6 and {0, 1} < set(case.batch.lengths)
    assert case.batch.num_tokens >= 512, "so many, that one of them does not decide"
    counts = find_beginnings(case.batch, MegatronConfig(), get_platform("cpu")).common
    assert sorted(counts)[-3:] == [40, 40, 40], "four samples of a prompt that is computed once"
    assert case.probe.columns == tuple(range(sum(case.probe.lengths))) and case.probe == case.token_probe
    window = {"use_sliding_window": True, "sliding_window": 240, "max_window_layers": 0, "layer_types": None}
    made_for = ModelSpec.from_folder(write_config(tmp_path, make_tiny_model(tmp_path, "qwen2"), **window))
    made = make_case(made_for, 1, str(tmp_path))
    case = made.window_probe
    assert case.lengths[-1] == 246, "the last token does not see the first six"
    last, window = sum(case.lengths) - 1, 240
    assert {last - window, last - window + 1} < set(case.columns), "both sides of the window's edge"
    visible = case.compute_visible(made_for.rules[0])
    assert not visible[last, last - window] and visible[last, last - window + 1]
    assert max(made.probe.lengths) < window, "for the window's own rule alone are copies so long"


def test_of_a_large_model_fewer_columns_are_looked_for(tmp_path, monkeypatch):
    """Each takes a forward pass of all sequences."""
    model = ModelSpec.from_folder(make_tiny_model(tmp_path, "qwen2"))
    monkeypatch.setattr(ModelSpec, "count_weights", lambda model: 134_515_008)
    case = make_case(model, 1, str(tmp_path))
    assert len(case.token_probe.columns) == 12 and len(case.probe.columns) == sum(case.probe.lengths)


@pytest.fixture
def nothing_starts(monkeypatch):
    import ray

    for start in ("init", "remote"):
        monkeypatch.setattr(ray, start, None)


def test_a_model_that_an_engine_cannot_hold_is_refused_before_anything_starts(make_hf_model, nothing_starts):
    sizes = ("--actor.ranks", "3", "--actor.tp", "3")
    done = run_program(cli.main, "check", make_hf_model("llama", False), *sizes)
    assert done.returncode == 1 and "tp=3 does not divide the model's 4 attention heads" in done.stderr


def test_a_tied_head_that_is_not_the_embedding_is_refused_before_anything_starts(tmp_path, nothing_starts):
    """HuggingFace would keep both apart and have a gradient for each."""
    weights = load_file(Path(make_tiny_model(tmp_path, "qwen2"), "model.safetensors"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done = run_program(cli.main, "check", tmp_path)
    assert done.returncode == 1 and "has tie_word_embeddings true, but lm_head.weight in" in done.stderr


def test_the_self_test_is_exact():
    for changes in (dict(huggingface=False), dict(rollout=VllmConfig(dtype="bfloat16"))):
        with pytest.raises(ValueError, match="the faults of --self-test show only in float32 and against"):
            CheckConfig(self_test=True, **changes)


def test_a_given_model_is_tested_with_the_faults_that_it_can_show(make_hf_model):
    assert CheckConfig(model="folder", self_test=True).self_test
    tied, untied = (ModelSpec.from_folder(make_hf_model("qwen2", tied)) for tied in (True, False))
    always = ["a rotary base of twice the size", "all weights stale", "stale weights"]
    assert list(list_real_faults(untied)) == always
    large = replace(tied, vocab=262_144)
    assert list(list_real_faults(large)) == [*always, "a tied head left behind", "log_softmax of a large vocabulary"]


def test_faults_are_planted_where_the_code_is_that_they_change(monkeypatch):
    from rlworker.checks import self_test

    planted = {}
    monkeypatch.setattr(self_test, "running_ray", lambda *_: nullcontext())
    monkeypatch.setattr(self_test, "make_tiny_model", lambda folder, kind: kind)
    monkeypatch.setattr(self_test, "_test_model", lambda config, kind, faults, tell: planted.update(faults) or [])
    of_replay = {"routes of the token before", "routes of the layer before", "cached tokens without routes"}
    of_images = {"a rollout that sees images causally", "an image cut by a chunk"}
    for platform, absent in (("cpu", set()), ("cuda-emulated", set()), ("cuda", of_replay | of_images)):
        planted.clear()
        self_test.run_self_test(CheckConfig(self_test=True, platform=platform), "", print)
        assert set(FAULTS) - set(planted) == absent


@pytest.mark.product
def test_faults_are_found_in_a_given_model(make_hf_model):
    """On a real one they are told in docs/masks.md."""
    command = [Path(sys.executable).parent / "rlworker", "check", make_hf_model("qwen2", True), "--json", "--self-test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    found = {finding["where"]: finding["outcome"] for finding in json.loads(done.stdout)}
    names = ["a rotary base of twice the size", "all weights stale", "stale weights", "a tied head left behind"]
    assert done.returncode == 0 and all(found[name] == "ok" for name in names), (found, done.stderr)


def test_padding_stands_in_no_text_of_a_check(make_hf_model, tmp_path):
    """transformers gives its embedding no gradient, and a row of zeros that a norm then blows up."""
    folder = shutil.copytree(make_hf_model("qwen2", False), tmp_path / "model")
    spec = ModelSpec.from_folder(folder)
    used = int(make_case(spec, 1, str(tmp_path)).batch.inputs[0])
    write_config(folder, folder, pad_token_id=used)
    batch = make_case(spec, 1, str(tmp_path)).batch
    assert used not in batch.inputs and used not in batch.targets and batch.num_tokens
