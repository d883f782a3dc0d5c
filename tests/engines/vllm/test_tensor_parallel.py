"""An engine of two devices in its Ray process: it samples what one device does, and none of its processes is left."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from support.cover import in_runs
from support.huggingface import load_folder, measure_versions
from support.models import make_language_model
from support.ranks.vlm_cases import make_images, make_prompts
from support.rollout_workers import (
    Prompt,
    ask,
    draw,
    find_unlike,
    list_spans,
    make_requests,
    needs,
    send,
    update_in_flight,
)

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from engines.weight_sync import pack_buckets
from hardware.vllm_versions import CAUSAL_FLAGS, CPU_EXPERTS
from rlworker.checks.tiny.models import make_tiny_model

pytestmark = pytest.mark.usefixtures("by_value")
CONFIG = VllmConfig(max_new_tokens=8, max_model_len=256, max_num_seqs=64, kv_cache_mb=64)
PROMPTS = [Prompt((3, 4, 5)), Prompt((7, 8, 9, 10)), Prompt((6,)), Prompt(tuple(range(3, 90)))]
MODELS = ("qwen2", True), ("qwen3_5_text", False)
"""Models, and whether they are tied: of attention, and with states."""
SHARED = Path("/dev/shm")
GONE_S = 20.0
"""Seconds in which the processes of an engine are gone."""


def sampling(seed: int) -> Sampling:
    return Sampling(4, 1.0, 8, (seed,), (2, 11, 12, 13))


def start(folder: str, tp: int, **vllm):
    """An engine of so many devices, with further arguments of vLLM."""
    from rlworker.cluster.worker_pool import start_workers
    from rlworker.cluster.workers import RolloutWorker

    (worker,) = start_workers(RolloutWorker, "cpu", [(0, tp)], tp)
    ask(worker.start, ModelSpec.from_folder(folder), replace(CONFIG, tp=tp, vllm=vllm))
    return worker


def end(*workers, keep: bool = True) -> None:
    from rlworker.cluster.worker_pool import end_workers

    end_workers(workers, keep)


def compare_engines(one, two, prompts, seed: int) -> float:
    """Largest difference of a token's logprob between engines that must sample the same tokens."""
    left, right = (draw(worker, prompts, sampling(seed)) for worker in (one, two))
    assert [one.token_ids.tolist() for one in left] == [one.token_ids.tolist() for one in right]
    return max(float(abs(one.logprobs - other.logprobs).max()) for one, other in zip(left, right, strict=True))


def change(folder: str, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Other weights for a model's folder, tied as it is."""
    torch.manual_seed(seed)
    weights, names = SafetensorsFolder(folder), sorted(ModelSpec.from_folder(folder).list_hf_names())
    return [(name, weights[name] * 1.1 + 0.02 * torch.randn(weights[name].shape)) for name in names]


def compare_over_syncs(folder: str, prompts, measured, devices: int = 2, **vllm) -> None:
    """Compare engines of one and several devices before an update, after one in many buckets, and after one of which
    the first half came twice, of other weights the first time.

    Args:
        vllm: arguments of vLLM for the engine of several devices.
    """
    one, two = start(folder, 1), start(folder, devices, **vllm)
    differences = [compare_engines(one, two, prompts, seed) for seed in (1, 2)]
    before = draw(two, prompts, sampling(3))
    for worker in (one, two):
        send(worker, change(folder, 5), 100_000)
    differences += [compare_engines(one, two, prompts, 3)]
    assert draw(two, prompts, sampling(3)) != before, "the update shows"
    half = list(pack_buckets(iter(change(folder, 6)), 100_000))
    for bucket, _ in half[: len(half) // 2]:
        ask(two.load_weights, bucket, 2, False)
    for worker in (one, two):
        send(worker, change(folder, 7), 100_000)
    differences += [compare_engines(one, two, prompts, 4)]
    fused = (".experts.gate_up_proj", ".experts.down_proj")  # which vLLM turns as it loads them
    unread = {name for name, _ in change(folder, 7) if name.endswith(fused)}
    for columns in (0, 5):
        assert find_unlike(two, change(folder, 7), columns) == unread, "of what all devices have"
        assert find_unlike(two, change(folder, 5), columns) == {name for name, _ in change(folder, 5)}
    end(one, two)
    measured({"several devices against one": max(differences)})
    assert max(differences) <= 1e-5


UNTIED = ("llama", "qwen3", "gemma3_text")


@pytest.mark.parametrize(
    ("name", "tied"),
    in_runs(large=MODELS[:1], product=[*MODELS[1:], *((name, False) for name in ("qwen3_next", *UNTIED))]),
)
def test_two_devices_sample_what_one_does(cluster, make_hf_model, measured, name, tied):
    compare_over_syncs(make_hf_model(name, tied), PROMPTS, measured)


@pytest.mark.product
@pytest.mark.parametrize(("name", "devices"), [("qwen2-one-head", 2), ("qwen2", 4)])
def test_devices_that_share_a_head_of_keys_and_values(cluster, make_hf_model, measured, name, devices):
    compare_over_syncs(make_hf_model(name, False), PROMPTS, measured, devices)


@pytest.mark.product
@pytest.mark.parametrize(("name", "tied"), MODELS)
def test_new_weights_reach_two_devices_in_flight(cluster, make_hf_model, measured, name, tied):
    folder, prompts = make_hf_model(name, tied), PROMPTS[:3]
    worker, weights = start(folder, 2), change(folder, 5)
    old, new = load_folder(folder), load_folder(folder)
    new.load_state_dict(dict(weights), strict=False)
    requests = make_requests(prompts, Sampling(1, 1.0, 60, (), ()))
    completions = update_in_flight(worker, requests, 30, weights)
    end(worker)
    found = measure_versions({0: old, 1: new}, prompts, completions)
    measured({f"version {version}": float(values.max()) for version, values in found.items()})
    versions, lengths = list_spans(completions)
    assert versions == [0, 1] * 3 and min(lengths) > 25
    assert all(values.max() <= 1e-4 and values.mean() <= 2e-6 for values in found.values())


@pytest.mark.product
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=needs(CAUSAL_FLAGS))])
def test_two_devices_see_images(cluster, tmp_path, measured, family):
    """With Gemma 3 the rule of images is installed in processes that this test's worker did not start itself."""
    folder = make_tiny_model(tmp_path / "model", family)
    (tmp_path / "images").mkdir()
    prompts = make_prompts(ModelSpec.from_folder(folder), make_images(tmp_path / "images"))
    compare_over_syncs(folder, prompts, measured)


@needs(CPU_EXPERTS)
@pytest.mark.parametrize("family", in_runs(large=["qwen3_moe"], product=["qwen2_moe", "qwen3_vl_moe"]))
def test_two_devices_share_out_experts(cluster, tmp_path, measured, family):
    """Each has half of them whole, loads those alone of a sync, and leaves the others to the other device."""
    prompts = PROMPTS
    if family == "qwen3_vl_moe":  # whose folders have the experts of a layer in one tensor
        folder = make_tiny_model(tmp_path / "model", family)
        (tmp_path / "images").mkdir()
        prompts = make_prompts(ModelSpec.from_folder(folder), make_images(tmp_path / "images"))
    else:
        folder = make_language_model(tmp_path / "model", family, False)
    compare_over_syncs(folder, prompts, measured, enable_expert_parallel=True)


def find_processes(worker) -> list:
    """The engine's process, and those of its devices."""
    engine = psutil.Process(ask(worker.__ray_call__, lambda _: os.getpid()))
    return [engine, *(child for child in engine.children() if "VLLM::Worker" in " ".join(child.cmdline()))]


def wait_for_end(processes: list) -> list:
    """Those of the processes that are left after ``GONE_S``."""
    return psutil.wait_procs(processes, timeout=GONE_S)[1]


@pytest.mark.large
def test_an_engine_that_is_killed_leaves_no_process(cluster, make_hf_model):
    """Not even one that stands still, and would hear of nothing."""
    before = set(SHARED.iterdir())
    worker = start(make_hf_model("qwen2", True), 2)
    engine, *devices = processes = find_processes(worker)
    assert len(devices) == 2
    devices[0].suspend()
    engine.send_signal(signal.SIGKILL)
    assert wait_for_end(processes) == []
    end(worker, keep=False)
    left = [path.name for path in set(SHARED.iterdir()) - before]
    assert [name for name in left if not name.startswith("sem.")] == [], "a lock of four kilobytes apart"


@pytest.mark.product
def test_an_engine_that_loses_a_device_ends(cluster, make_hf_model):
    """So that it is found like any process that died, and not waited for."""
    worker = start(make_hf_model("qwen2", True), 2)
    processes = find_processes(worker)
    assert len(processes) == 3
    processes[2].send_signal(signal.SIGKILL)
    assert wait_for_end(processes) == []
    end(worker, keep=False)
