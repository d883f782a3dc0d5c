"""vLLM in its own Ray process: logprobs against HuggingFace before and after weights are replaced in place."""

import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cover import in_runs
from support.huggingface import compute_logprobs, load_folder, make_batch, measure_differences, move_weights
from support.models import VOCAB
from support.rollout_workers import Prompt, ask, draw, find_unlike, make_requests, needs, send, start_engine

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completion, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from engines.weight_sync import pack_buckets
from hardware.vllm_versions import CPU_EXPERTS, KEYS_FIRST, TIED_HEADS
from rlworker.checks.reference.huggingface import iterate_logits
from rlworker.checks.tiny.models import make_tiny_text

pytestmark = pytest.mark.usefixtures("by_value")
CONFIG = VllmConfig(max_new_tokens=8, max_model_len=256, max_num_seqs=64, kv_cache_mb=64)
PROMPTS = [Prompt((3, 4, 5)), Prompt((7, 8, 9, 10)), Prompt((6,))]
STOP = (2, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)


def sampling(count=4, temperature=1.0, seed=1, max_tokens=8):
    return Sampling(count, temperature, max_tokens, (seed,), STOP)


@pytest.fixture(scope="module", params=in_runs(default=[True], product=[False]), ids=["tied", "untied"])
def rollout(request, cluster, make_hf_model):
    """An engine, its model's folder and whether it is tied. The trainers' default run has one that is not."""
    folder = make_hf_model("qwen2", request.param)
    with start_engine(ModelSpec.from_folder(folder), CONFIG) as worker:
        yield worker, folder, request.param


@pytest.fixture
def patched(cluster):
    """A process of its own for a test that patches what is in it."""
    import ray

    from rlworker.cluster.workers import RolloutWorker

    worker = ray.remote(RolloutWorker).options(num_cpus=0).remote("cpu", 0)  # beside those that are kept
    yield worker
    ray.kill(worker)


def worst(model, completions, temperature=1.0, prompts=PROMPTS) -> float:
    """Largest |vLLM - HuggingFace| over every sampled token."""
    return float(measure_differences(model, prompts, completions, temperature).max())


def weights_of(model, tied):
    return [(n, t) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")]


def changed(folder):
    return move_weights(load_folder(folder))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(rollout, temperature):
    worker, folder, tied = rollout
    model = load_folder(folder)
    version = send(worker, weights_of(model, tied))
    completions = draw(worker, PROMPTS, sampling(temperature=temperature))
    assert worst(model, completions, temperature) <= 1e-5
    assert all(sample.version == version for sample in completions)
    for sample in completions:
        ended = sample.token_ids[-1] in STOP
        assert sample.finished == ended and (ended or len(sample.token_ids) == 8)
        assert not set(sample.token_ids[:-1]) & set(STOP)
    assert {sample.finished for sample in completions} == {True, False}


@pytest.mark.large
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_likeliest_tokens_are_the_whole_vocabularys_and_change_nothing(rollout, measured, temperature):
    """To the last bit the same tokens and logprobs with 0, 1, 25 (above vLLM's own limit) and all; greedily none."""
    worker, folder, tied = rollout
    model = load_folder(folder)
    send(worker, weights_of(model, tied))
    without = draw(worker, PROMPTS, sampling(temperature=temperature))
    assert all(sample.top_ids is None for sample in without)
    batch = make_batch(PROMPTS, without)
    log_p = torch.cat([logits[one.mask] for one, logits in iterate_logits(model, batch)]) / temperature
    log_p = log_p - log_p.logsumexp(-1, keepdim=True)
    for top in (1, 25, VOCAB):
        found = draw(worker, PROMPTS, replace(sampling(temperature=temperature), top_logprobs=top))
        assert [replace(sample, top_ids=None, top_logprobs=None) for sample in found] == without
        ids = torch.from_numpy(np.concatenate([sample.top_ids for sample in found])).long()
        logprobs = torch.from_numpy(np.concatenate([sample.top_logprobs for sample in found]))
        assert ids.shape == (len(log_p), top) and all(len(set(row)) == top for row in ids.tolist())
        measured({"likeliest": float((log_p.topk(top)[0] - logprobs).abs().max())})
        assert float((log_p.topk(top)[0] - logprobs).abs().max()) <= 1e-5, "they are the largest, largest first"
        assert float((log_p.gather(-1, ids) - logprobs).abs().max()) <= 1e-5, "and theirs"
    greedy = draw(worker, PROMPTS, replace(sampling(count=1, temperature=0.0), top_logprobs=5))
    assert all(sample.top_ids is None and len(sample.logprobs) == 0 for sample in greedy)


def test_a_seed_repeats(rollout):
    worker, *_ = rollout
    first, again, other = (draw(worker, PROMPTS, sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == again and first != other


def test_greedy_is_the_argmax(rollout):
    worker, folder, tied = rollout
    model = load_folder(folder)
    send(worker, weights_of(model, tied))
    prompt = PROMPTS[0]
    (sample,) = draw(worker, [prompt], sampling(count=1, temperature=0.0))
    batch = TrainBatch.from_ids([[*prompt.token_ids, *sample.token_ids]], [len(prompt.token_ids)])
    ((one, logits),) = iterate_logits(model, batch)
    assert logits[one.mask].argmax(-1).tolist() == sample.token_ids.tolist()


@pytest.mark.parametrize("bucket_bytes", [2**30, 3_000], ids=["one-bucket", "pieces"])
def test_new_weights_arrive_whole(rollout, bucket_bytes):
    """The output layer of a tied model included, which a plain reload on a CPU leaves behind."""
    worker, folder, tied = rollout
    model = changed(folder)
    version = send(worker, weights_of(model, tied), bucket_bytes)
    completions = draw(worker, PROMPTS, sampling(seed=4))
    assert worst(model, completions) <= 1e-5
    assert {sample.version for sample in completions} == {version}
    old = load_folder(folder)
    assert worst(old, completions) > 0.1, "the test can tell old weights from new"


def hold_back(worker, name: str, is_held: bool) -> None:
    """Let the engine keep the weights of layer 1, or a tied head, through every sync: this runs in its process."""
    from engines.vllm import worker as module

    owner = module if name == "_repack_tied_heads" else module.WeightSyncExtension
    kept = worker.__dict__.setdefault("kept", {})
    if not is_held:
        return setattr(owner, name, kept.pop(name))
    kept[name] = take = getattr(owner, name)

    def skip(self, weights):
        return take(self, [(each, tensor) for each, tensor in weights if ".layers.1." not in each])

    setattr(owner, name, skip if name == "take_weights" else lambda model: None)


@pytest.mark.parametrize("columns", [0, 5], ids=["whole", "sample"])
def test_what_an_engine_computes_with_is_read_back(rollout, columns):
    """Its packed copies too: one layer's or the tied head's are left behind, and one bit of one weight is another.

    Without the packing of tied heads anew they are stale: when that fails here, vLLM has mended it.
    """
    worker, folder, tied = rollout
    old, weights = weights_of(load_folder(folder), tied), weights_of(changed(folder), tied)
    send(worker, old)
    for name in ("take_weights", "_repack_tied_heads")[: 1 + (tied and TIED_HEADS.is_there)]:
        ask(worker.__ray_call__, hold_back, name, True)
        send(worker, weights)
        ask(worker.__ray_call__, hold_back, name, False)
        stale = {each for each, _ in weights if ".layers.1." in each} if name == "take_weights" else {weights[0][0]}
        assert find_unlike(worker, weights, columns) == stale and len(stale) in (1, 12)
        send(worker, old)
    send(worker, weights)
    assert find_unlike(worker, weights, columns) == set()
    assert find_unlike(worker, old, columns) == {name for name, _ in weights}
    name, one = next(pair for pair in weights if pair[0].endswith("layers.2.self_attn.o_proj.weight"))
    with torch.no_grad():
        one[3] *= 1 + 2**-23
    assert find_unlike(worker, weights, columns) == {name}


def test_given_tokens_are_scored_by_the_logits_as_they_are(rollout):
    worker, folder, tied = rollout
    model = load_folder(folder)
    version = send(worker, weights_of(model, tied))
    prompts = [*PROMPTS[:2], PROMPTS[1]]  # the last is scored as often as it is asked
    scores = draw(worker, prompts, replace(sampling(count=1, temperature=1.0), scores_prompt=True))
    assert [score.token_ids.tolist() for score in scores] == [[4, 5], [8, 9, 10], [8, 9, 10]]
    assert [score.version for score in scores] == [version] * 3 and all(len(score.spans) == 1 for score in scores)
    heads = [Prompt(prompt.token_ids[:1]) for prompt in prompts]
    assert worst(model, scores, prompts=heads) <= 1e-5


def test_a_cached_prompt_is_computed_anew_after_a_sync(rollout):
    worker, folder, tied = rollout
    prompt = [Prompt(tuple(3 + i % 90 for i in range(230)))]  # longer than a cache block
    old, new = load_folder(folder), changed(folder)
    for model in (old, new):
        send(worker, weights_of(model, tied))
        first, again = (draw(worker, prompt, sampling(count=2)) for _ in range(2))
        assert worst(model, first, prompts=prompt) <= 1e-5
        assert first == again, "bit for bit: a call does not depend on what the one before it left in the cache"


def count_computed(worker, requests, seed: int) -> tuple[int, list[Completion]]:
    scheduler = worker.engine.llm.llm_engine.engine_core.engine_core.scheduler
    with patch.object(scheduler, "schedule", wraps=scheduler.schedule) as schedule:
        steps = []
        schedule.side_effect = lambda *args: steps.append(type(scheduler).schedule(scheduler, *args)) or steps[-1]
        completions = worker.loop.call(worker.engine.sample, requests, seed)
    return sum(step.total_num_scheduled_tokens for step in steps), completions


def read_settings(worker) -> tuple[int, bool]:
    config = worker.engine.llm.llm_engine.vllm_config
    return config.cache_config.block_size, config.model_config.enforce_eager


LENGTHS = (50, 64, 33, 7)
"""Of prompts: with a part of a block, with none, with a block but for a token, and without a block."""


@needs(KEYS_FIRST)
def test_a_prompt_is_computed_once_for_all_of_its_samples(rollout):
    """But for its last token, from which each of them is sampled."""
    worker, folder, tied = rollout
    prompts = [Prompt(tuple(20 + (i * 7 + length) % 70 for i in range(length))) for length in LENGTHS]
    assert ask(worker.__ray_call__, read_settings) == (32, True), "those of the platform"
    model = changed(folder)
    send(worker, weights_of(model, tied))
    asked = replace(sampling(count=5, max_tokens=3), stop_token_ids=())
    computed, completions = ask(worker.__ray_call__, count_computed, make_requests(prompts, asked), asked.seed)
    assert computed == sum(LENGTHS) + len(LENGTHS) * (4 * 1 + 5 * 2)
    assert worst(model, completions, prompts=prompts) <= 1e-5


@pytest.mark.large
@pytest.mark.parametrize("seqs", [3, 64])
@pytest.mark.parametrize("tokens", [40, 90])
def test_samples_that_begin_and_end_at_other_times_share_a_prompt(cluster, make_hf_model, measured, seqs, tokens):
    """Few at a time; with keys and values given up for want of memory and computed again; and from one to another."""
    folder = make_hf_model("qwen2", False)
    prompts = [Prompt(tuple(20 + (i * 7 + length) % 70 for i in range(length))) for length in (50, 75, 120)]
    config = replace(CONFIG, max_num_seqs=seqs, kv_cache_mb=2, max_new_tokens=tokens)
    with start_engine(ModelSpec.from_folder(folder), config) as worker:
        first, again = (draw(worker, prompts, sampling(count=12, max_tokens=tokens)) for _ in range(2))
    other = replace(config, vllm={"enable_prefix_caching": False, "block_size": 64})
    with start_engine(ModelSpec.from_folder(folder), other) as worker:
        assert ask(worker.__ray_call__, read_settings) == (64, True), "what a user sets comes before the platform's"
        requests = make_requests(prompts, sampling(count=12, max_tokens=tokens))
        alone, _ = ask(worker.__ray_call__, count_computed, requests, 0)
    found = measure_differences(load_folder(folder), prompts, first)
    measured({f"{seqs} at a time": float(found.max())})
    assert found.mean() <= 2e-6 and found.max() <= 1e-4
    assert first == again, "bit for bit"
    assert alone >= 12 * (50 + 75 + 120), "and not where the prefix cache is off"


def test_a_dropped_tensor_and_an_unknown_one_are_refused(rollout):
    worker, folder, tied = rollout
    weights = weights_of(load_folder(folder), tied)
    with pytest.raises(ValueError, match=r"version \d+ came without .*" + weights[-1][0]):
        send(worker, weights[:-1])
    version = send(worker, weights)
    (bucket, last), *_ = pack_buckets(iter(weights), 2**30)
    with pytest.raises(ValueError, match=f"version {version} was sent to an engine that has version {version}"):
        ask(worker.load_weights, bucket, version, last)
    assert worst(load_folder(folder), draw(worker, PROMPTS, sampling())) <= 1e-5


def test_an_update_may_begin_again_halfway(rollout):
    """Whoever sends after a fault begins with the first bucket, whatever the engine had got before."""
    worker, folder, tied = rollout
    model, version = changed(folder), ask(worker.get_version) + 1
    half = list(pack_buckets(iter(weights_of(load_folder(folder), tied)), 20_000))
    with pytest.raises(ValueError, match="to an engine that has not got the first one"):
        ask(worker.load_weights, half[1][0], version, False)
    for bucket, _ in half[: len(half) // 2]:
        ask(worker.load_weights, bucket, version, False)
    for size in (20_000, 33_000):  # cut alike, and otherwise
        version = send(worker, weights_of(model, tied), size)
        completions = draw(worker, PROMPTS, sampling(seed=size))
        assert worst(model, completions) <= 1e-5
        assert {sample.version for sample in completions} == {version}
        bucket, _ = half[0]
        ask(worker.load_weights, bucket, version + 1, False)


def test_an_older_version_is_taken_where_the_trainer_went_back(rollout):
    worker, folder, tied = rollout
    model, version = changed(folder), send(worker, weights_of(load_folder(folder), tied))
    (bucket, last), *_ = pack_buckets(iter(weights_of(model, tied)), 2**30)
    ask(worker.rewind, version - 1)
    assert ask(worker.get_version) == version, "what is here keeps its name until the other one came"
    with pytest.raises(ValueError, match=f"version {version - 2} was sent"):
        ask(worker.load_weights, bucket, version - 2, last)
    ask(worker.load_weights, bucket, version - 1, last)
    assert ask(worker.get_version) == version - 1
    assert worst(model, draw(worker, PROMPTS, sampling())) <= 1e-5
    with pytest.raises(ValueError, match=f"version {version - 1} was sent"):
        ask(worker.load_weights, bucket, version - 1, last)


TEXT = [5, 9, 30, 7, 61, 12]


@pytest.fixture
def mixture(tmp_path):
    """A tiny mixture-of-experts model in vLLM, driven through the worker extension: no trainer has a table for it."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
    shape = dict(num_hidden_layers=2, head_dim=32, initializer_range=0.1)
    return make_tiny_text(tmp_path, "qwen3_moe", VOCAB, tied=False, **shape, **experts)


def replace_experts(worker, folder: str, with_workaround: bool) -> list[float]:
    """vLLM's logprobs of ``TEXT`` after new weights came in, which are left in the folder: this runs in its process."""
    from vllm import LLM, SamplingParams

    import engines.vllm.worker as extension

    if not hasattr(worker, "llm"):
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would have the last word
        worker.llm = LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=2**26,
            max_model_len=64,
            skip_tokenizer_init=True,
            worker_extension_cls="engines.vllm.worker.WeightSyncExtension",
        )
        worker.kept = extension._forget_packed_experts
    extension._forget_packed_experts = worker.kept if with_workaround else lambda model: None
    weights = load_file(f"{folder}/model.safetensors")
    torch.manual_seed(int(with_workaround))
    weights = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in weights.items()}
    worker.llm.collective_rpc("begin_sync")
    worker.llm.collective_rpc("take_weights", args=(list(weights.items()),))
    worker.llm.collective_rpc("end_sync")
    worker.llm.reset_prefix_cache()
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = worker.llm.generate([{"prompt_token_ids": TEXT}], params, use_tqdm=False)
    return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], TEXT[1:])]


@pytest.mark.large
def test_experts_are_packed_anew(patched, mixture):
    """With the workaround the logprobs are right; without it they are not: when this fails, vLLM has mended it. Older
    versions pack them at each load."""
    from transformers import AutoModelForCausalLM

    def apart(with_workaround: bool) -> float:
        """Largest |vLLM - HuggingFace| for the same weights."""
        got = ask(patched.__ray_call__, replace_experts, mixture, with_workaround)
        model = AutoModelForCausalLM.from_pretrained(mixture, attn_implementation="eager")
        return float((torch.tensor(got) - compute_logprobs(model, TrainBatch.from_ids([TEXT], [1]))).abs().max())

    assert apart(with_workaround=True) <= 1e-5
    assert (apart(with_workaround=False) > 1e-2) == CPU_EXPERTS.is_there
    assert apart(with_workaround=True) <= 1e-5


@pytest.mark.large
def test_an_engine_that_was_handed_on_samples_what_a_new_one_does(patched, make_hf_model):
    """The process has run another model, at other sizes and with other weights, before."""
    folders = make_hf_model("qwen2", True), make_hf_model("llama", False)
    first, other = (ModelSpec.from_folder(folder) for folder in folders)
    with start_engine(other, replace(CONFIG, max_model_len=64, max_num_seqs=8)) as before:
        send(before, weights_of(changed(other.folder), False))
        draw(before, PROMPTS, sampling(seed=9))
    ask(patched.start, first, CONFIG)
    with start_engine(first, CONFIG) as kept:
        assert kept == before, "the process was handed on"
        assert ask(kept.get_version) == 0
        for seed in (1, 2):
            got, want = (draw(worker, PROMPTS, sampling(seed=seed)) for worker in (kept, patched))
            assert got == want, "tokens and logprobs, bit for bit"
