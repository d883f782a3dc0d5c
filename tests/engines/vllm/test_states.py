"""States in vLLM: logprobs against HuggingFace of prompts in chunks, of cached beginnings and after a weight sync."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from support.cover import in_runs
from support.huggingface import load_folder, measure_differences, move_weights, name_weights
from support.models import LANGUAGE_MODELS, VOCAB
from support.rollout_workers import Prompt, ask, find_unlike, make_requests, needs, send, start_engine

from engines.batch.samples import Completion, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.vllm_versions import STATES_ALONE
from rlworker.checks.tiny.models import make_tiny_text

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large]
CONFIG = VllmConfig(max_new_tokens=24, max_model_len=640, max_num_seqs=3, kv_cache_mb=128)
CHUNKS = {"max_num_batched_tokens": 256}
"""vLLM's arguments by which a forward pass takes a part of the longer prompts."""
GENERATOR = torch.Generator().manual_seed(0)
BEGINNING = torch.randint(3, 99, (420,), generator=GENERATOR).tolist()
LENGTHS = (1, 2, 3, 4, 17, 63, 64, 65, 130, 301)
PROMPTS = [Prompt(tuple(torch.randint(3, 99, (length,), generator=GENERATOR).tolist())) for length in LENGTHS]
PROMPTS += [Prompt((*BEGINNING[:length], 5, 7, length % 90 + 3)) for length in (60, 300, 420, 419, 420)]
SAMPLING = Sampling(4, 1.0, 24, (1,), (2, 11, 12, 13))


@pytest.fixture(scope="module", params=[{}, CHUNKS], ids=["whole prompts", "chunks"])
def rollout(request, cluster, tmp_path_factory):
    family, settings = LANGUAGE_MODELS["qwen3_5_text"]
    settings = settings | {"max_position_embeddings": CONFIG.max_model_len, "eos_token_id": 2}
    spec = ModelSpec.from_folder(
        make_tiny_text(tmp_path_factory.mktemp("model"), family, VOCAB, tied=False, **settings)
    )
    further = {"mtp.fc.weight": torch.ones(128, 256), "mtp.norm.weight": torch.ones(128)}  # which vLLM passes over
    save_file(further, Path(spec.folder, "further.safetensors"))
    with start_engine(spec, replace(CONFIG, vllm=request.param)) as worker:
        yield worker, spec, 8 if request.param else 1  # prompts are cut at the last end of a block as well


def sample(worker, requests, seed: int) -> tuple[list[Completion], list[int], int]:
    """Sample as the engine does, and count the cached tokens of each request, and the passes that cut a prompt; this
    runs in its process."""
    engine, cached, cut = worker.engine, [], [0]
    read, core = engine.read_output, engine.llm.llm_engine.engine_core.engine_core
    schedule = core.scheduler.schedule

    def watch(*args, **kwargs):
        scheduled = schedule(*args, **kwargs)
        for name, count in scheduled.num_scheduled_tokens.items():
            request = core.scheduler.requests[name]
            cut[0] += request.num_computed_tokens - count < request.num_prompt_tokens > request.num_computed_tokens
        return scheduled

    engine.read_output = lambda request, output: cached.append(output.num_cached_tokens) or read(request, output)
    core.scheduler.schedule = watch
    try:
        return engine.sample(requests, seed), cached, cut[0]
    finally:
        del engine.read_output, core.scheduler.schedule


@needs(STATES_ALONE)
def test_logprobs_before_and_after_a_sync(rollout, measured):
    worker, spec, least = rollout
    old, new = load_folder(spec.folder), move_weights(load_folder(spec.folder), spec)
    requests = make_requests(PROMPTS, SAMPLING)
    for label, model in (("before", old), ("after", new)):
        weights = name_weights(model, spec)
        send(worker, weights.items(), 20_000)
        assert find_unlike(worker, weights.items()) == set()
        found, cached, cut = ask(worker.__ray_call__, sample, requests, 1)
        differences = measure_differences(model, PROMPTS, found)
        measured({f"{label}, mean": float(differences.mean()), label: float(differences.max())})
        assert differences.mean() <= 1e-5 and differences.max() <= 1e-4
        assert any(cached) and cut >= least, "the test has both: states that were cached, prompts in parts"
    assert measure_differences(old, PROMPTS, found).max() > 0.1, "the test can tell old weights from new"


@needs(STATES_ALONE)
def test_a_stale_convolution_is_named(rollout):
    worker, spec, _ = rollout
    model = load_folder(spec.folder)
    weights = name_weights(model, spec)
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.mul_(1.0 if ".1.linear_attn.conv1d." in name else 1.2)
    send(worker, weights.items())
    (name,) = (name for name in weights if ".1.linear_attn.conv1d." in name)
    with torch.no_grad():
        weights[name].mul_(1.2)  # in the trainer alone
    assert find_unlike(worker, weights.items()) == {name}
    assert find_unlike(worker, weights.items(), columns=2) == {name}


def start_without_layer(worker, spec: ModelSpec, config: VllmConfig) -> str:
    """Start an engine of a vLLM that passes over what was registered with it; this runs in the engine's process."""

    from hardware.cpu import state_rule

    with patch.object(state_rule, "install", lambda: None):
        try:
            worker.start(spec, config)
        except RuntimeError as error:
            return str(error)
    return "it started"


@needs(STATES_ALONE)
def test_a_layer_that_vllm_passes_over_ends_the_start(cluster, make_hf_model):
    import ray

    from rlworker.cluster.workers import RolloutWorker

    worker = ray.remote(RolloutWorker).options(num_cpus=0).remote("cpu", 0)
    spec, config = ModelSpec.from_folder(make_hf_model("qwen3_5_text", False)), replace(CONFIG, max_model_len=64)
    try:
        told = ask(worker.__ray_call__, start_without_layer, spec, config)
    finally:
        ray.kill(worker)
    assert "'QwenGatedDeltaNetAttention'" in told and "expected" in told and "'StateRuleLayer'" in told


def sample_in_little_memory(worker, requests, seed: int) -> tuple[list[Completion], int]:
    """Sample, and count the requests that gave up the states of sampled tokens for want of memory; this runs in its
    process."""
    scheduler = worker.engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, [0]

    def watch(request, *args, **kwargs):
        count[0] += request.num_output_tokens > 0
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = watch
    try:
        return worker.engine.sample(requests, seed), count[0]
    finally:
        del scheduler._preempt_request


@pytest.mark.parametrize("family", in_runs(default=["qwen3_next"], product=["qwen3_5_text"]))
def test_a_preempted_request_begins_its_state_anew(cluster, tmp_path, measured, family):
    """Memory for one of the longest sequences, by our own count, is given to several requests at once."""
    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.config.model_checks import check_rollout

    longest, tokens = 57 * 32, 160  # 64 blocks of a layer fit into 1 MB: vLLM's own, and two for each layer's state
    settings = LANGUAGE_MODELS[family][1] | {"max_position_embeddings": longest + 1, "eos_token_id": 2}
    spec = ModelSpec.from_folder(make_tiny_text(tmp_path / "model", family, VOCAB, tied=False, **settings))
    config = replace(CONFIG, max_num_seqs=8, max_new_tokens=tokens, kv_cache_mb=1, max_model_len=longest)
    check_rollout(spec, "cpu", config)
    with pytest.raises(ValueError, match="kv_cache_mb=1 gives 1 MB to keys and values, expected at least 2 for"):
        check_rollout(spec, "cpu", replace(config, max_model_len=longest + 1))
    prompts = [prompt for prompt in PROMPTS if len(prompt.token_ids) > 60]
    prompts.append(Prompt(tuple(torch.randint(3, 99, (longest - tokens,), generator=GENERATOR).tolist())))
    with Rollouts("cpu", 1) as rollouts:
        (worker,) = rollouts.start(spec, config).wait().workers
        requests = make_requests(prompts, replace(SAMPLING, count=2, max_tokens=tokens, stop_token_ids=()))
        found, preempted = ask(worker.__ray_call__, sample_in_little_memory, requests, 1)
    differences = measure_differences(load_folder(spec.folder), prompts, found)
    measured({"preempted, mean": float(differences.mean()), "preempted": float(differences.max())})
    assert preempted > 1, "the test has requests that are computed again"
    assert differences.mean() <= 1e-5 and differences.max() <= 1e-4
