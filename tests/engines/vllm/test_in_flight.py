"""Rounds and free-running requests of a vLLM engine in its Ray process: what repeats, and what new weights do."""

import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.huggingface import compute_logprobs, load_folder, make_batch
from support.models import VOCAB
from support.rollout_workers import ask, send

from engines.batch.samples import Completions, Prompt, Request, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.checks.tiny_models import make_tiny_text

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large]
CONFIG = VllmConfig(max_new_tokens=8, max_model_len=512, max_num_seqs=64, kv_cache_mb=128)
STOP = (2, 11, 12, 13, 14, 15)
SOON_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of more positions than those of other tests."""
    place = tmp_path_factory.mktemp("long")
    return make_tiny_text(place, "qwen2", VOCAB, eos_token_id=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def rollouts(cluster, folder):
    """One engine, and its model's folder."""
    from rlworker.cluster.rollout_group import Rollouts

    with Rollouts("cpu", 1) as rollouts:
        yield rollouts.start(ModelSpec.from_folder(folder), CONFIG).wait(), folder


@pytest.fixture
def own(cluster, folder):
    """A process of its own, for a test that breaks it."""
    import ray

    from rlworker.cluster.worker_pool import POLL
    from rlworker.cluster.workers import RolloutWorker

    worker = ray.remote(concurrency_groups={POLL: 1})(RolloutWorker).options(num_cpus=0).remote("cpu", 0)
    ask(worker.start, ModelSpec.from_folder(folder), CONFIG)
    yield worker
    ray.kill(worker)


def make_prompts(count: int, length: int, seed: int = 0) -> list[Prompt]:
    ids = np.random.default_rng(seed).integers(20, 99, (count, length))
    return [Prompt(tuple(row)) for row in ids.tolist()]


def make_requests(prompts, tokens: int, stop=()) -> list[Request]:
    return [Request(prompt, 1.0, tokens, stop) for prompt in prompts]


def poll(worker, timeout_s: float = SOON_S):
    from rlworker.cluster.worker_pool import POLL

    return worker.take.options(concurrency_group=POLL).remote(timeout_s)


def take_all(worker, count: int) -> Completions:
    """Wait for requests with keys 0, 1, ...; their completions in this order."""
    import ray

    taken, end = {}, time.monotonic() + SOON_S
    while len(taken) < count:
        assert time.monotonic() < end
        taken |= dict(ray.get(poll(worker)))
    return Completions.join([taken[key] for key in range(count)])


def wait_for_tokens(worker, count: int) -> None:
    """Wait until a request that runs has sampled so many tokens."""

    def count_tokens(worker) -> int:
        states = worker.loop.call(worker.engine.llm.llm_engine.output_processor.request_states.values)
        return max((state.detokenizer.num_output_tokens() for state in list(states)), default=0)

    end = time.monotonic() + SOON_S
    while ask(worker.__ray_call__, count_tokens) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def nudge(folder: str):
    """The folder's model as an optimizer step of the demos' rate leaves it."""
    model = load_folder(folder)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(7e-4 * torch.randn_like(parameter).sign())
    return model


def name_weights(model) -> list:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


def measure(models: dict, prompts, completions: Completions) -> torch.Tensor:
    """|vLLM - HuggingFace| of each sampled token, under the weights that it says it was sampled by."""
    batch = make_batch(prompts, completions)
    expected = torch.full((batch.num_tokens,), torch.nan)
    for version, model in models.items():
        mask = batch.versions == version
        expected[mask] = compute_logprobs(model, batch)[mask]
    return (batch.rollout_logprobs - expected)[batch.mask].abs()


def keep_keys(worker, keep: bool) -> None:
    """Leave the caches as they are when new weights come, or empty them again."""
    if keep:
        worker.engine._empty_caches = lambda: None
    else:
        del worker.engine._empty_caches


def update_in_flight(worker, folder: str, prompts, keep: bool = False) -> tuple[dict, Completions]:
    """Sample 200 tokens of each prompt, with new weights from about the hundredth on.

    Args:
        keep: the keys of the old weights.

    Returns:
        the models by version, and the completions.
    """
    old, new = load_folder(folder), nudge(folder)
    first = send(worker, name_weights(old))
    ask(worker.submit, list(enumerate(make_requests(prompts, 200))))
    wait_for_tokens(worker, 100)
    if keep:
        ask(worker.__ray_call__, keep_keys, True)
    second = send(worker, name_weights(new), 20_000)
    if keep:
        ask(worker.__ray_call__, keep_keys, False)
    return {first: old, second: new}, take_all(worker, len(prompts))


def test_new_weights_in_flight_are_those_of_the_next_token(rollouts, measured):
    """Both segments of a completion are HuggingFace's under their own weights; with the old keys the second is not."""
    (rollout, folder), prompts = rollouts, make_prompts(8, 150)
    (worker,) = rollout.workers
    models, completions = update_in_flight(worker, folder, prompts)
    assert completions.span_counts.tolist() == [2] * 8
    assert completions.span_versions.tolist() == [*models] * 8 and completions.span_lengths.min() > 20
    found = measure(models, prompts, completions)
    measured({"mean": float(found.mean()), "largest": float(found.max())})
    assert found.mean() <= 2e-6 and found.max() <= 1e-4
    models, completions = update_in_flight(worker, folder, prompts, keep=True)
    found = measure(models, prompts, completions)
    versions = torch.from_numpy(np.repeat(completions.span_versions, completions.span_lengths))
    first, second = (found[versions == version] for version in models)
    measured({"keys kept": float(second.mean())})
    assert first.mean() <= 2e-6 and second.mean() > 1e-4, "the test can tell new keys from old ones"


def test_a_round_is_what_generate_samples_and_repeats_whatever_came_before(rollouts):
    (rollout, folder), prompts = rollouts, make_prompts(6, 140)
    (worker,) = rollout.workers
    send(worker, name_weights(load_folder(folder)))
    stream = (3, 1)
    grouped = [request for request in make_requests(prompts, 8, STOP) for _ in range(4)]
    first = rollout.sample(grouped, stream)
    assert first == ask(worker.generate, prompts, Sampling(4, 1.0, 8, (*stream, 0), STOP)), "bit for bit"
    ask(worker.submit, list(enumerate(make_requests(make_prompts(9, 150, 2), 30))))
    with pytest.raises(RuntimeError, match="a round needs the engine for itself"):
        rollout.sample(grouped, stream)
    ask(worker.abort, range(4))
    assert {key for key in range(4, 9)} == _take_keys(worker, 5)
    assert rollout.sample(grouped, stream) == first
    assert rollout.sample(grouped, (3, 2)) != first


def _take_keys(worker, count: int) -> set:
    import ray

    keys: set = set()
    while len(keys) < count:
        keys |= {key for key, _ in ray.get(poll(worker))}
    return keys


def test_each_request_has_its_own_limits(rollouts):
    (rollout, _), prompts = rollouts, make_prompts(40, 5)
    stops = [(number,) for number in range(20, 60)]
    asked = [Request(p, 1.0, 1 + i % 7, stop) for i, (p, stop) in enumerate(zip(prompts, stops, strict=True))]
    completions = rollout.sample([*asked, Request(prompts[0], 1.0, 300, tuple(range(3, 99)))], (1,))
    for one, request in zip(completions, asked, strict=False):
        ended = one.token_ids[-1] in request.stop_token_ids
        assert one.finished == ended and (ended or len(one.token_ids) == request.max_tokens)
        assert not set(one.token_ids[:-1].tolist()) & set(request.stop_token_ids)
    assert completions[40].finished and len(completions) == 41


def test_what_is_given_up_is_free_and_a_poll_holds_nothing_up(rollouts):
    import ray

    (rollout, _), prompts = rollouts, make_prompts(64, 150)
    (worker,) = rollout.workers

    def find_use(worker) -> tuple[int, float]:
        core = worker.engine.llm.llm_engine.engine_core.engine_core
        return worker.loop.call(lambda: (len(core.scheduler.requests), core.scheduler.kv_cache_manager.usage))

    ask(worker.submit, list(enumerate(make_requests(prompts, 300))))
    waiting = poll(worker)
    wait_for_tokens(worker, 3)
    requests, used = ask(worker.__ray_call__, find_use)
    assert requests == 64 and used > 0.1
    ask(worker.abort, range(64))
    assert ask(worker.__ray_call__, find_use) == (0, 0.0)
    ask(worker.submit, [("next", make_requests(prompts[:1], 2)[0])])
    ((key, completion),) = ray.get(waiting)
    assert key == "next" and len(completion.token_ids) == 2
    too_long = Request(Prompt(tuple(range(20, 90)) * 8), 1.0, 2, ())
    ask(worker.submit, [("long", too_long)])
    ((key, error),) = ray.get(poll(worker))
    assert key == "long" and isinstance(error, ValueError) and "512" in str(error)


def test_an_engine_that_breaks_tells_all_who_wait(own):
    """Sixty-four requests, a poll, a call that was waiting, and whoever comes later."""
    import ray

    def break_step(worker) -> None:
        patch.object(worker.engine, "step", side_effect=RuntimeError("device lost")).start()

    ask(own.submit, list(enumerate(make_requests(make_prompts(64, 20), 400))))
    waiting = poll(own)
    wait_for_tokens(own, 3)
    ask(own.__ray_call__, break_step)
    began = time.monotonic()
    for reference in (waiting, own.abort.remote([0]), own.submit.remote([]), own.generate.remote([], None)):
        with pytest.raises(RuntimeError, match="loop has ended: RuntimeError: device lost"):
            ray.get(reference)
    assert time.monotonic() - began < 1.0


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_calls_of_tools_are_read_where_vllm_is_and_faults_are_answers(rollouts):
    rollout, _ = rollouts
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    texts = [f"so {CALL}{CALL}", "plain", CALL[:30], '<tool_call>{"name": "add", "arguments": 3}</tool_call>', CALL]
    two, plain, cut, number, one = rollout.parse_tools(texts, "hermes", [tool])
    assert two.content == "so " and two.calls == (("add", '{"a": 1}'),) * 2 and not two.error
    assert (plain.content, plain.calls, plain.error) == ("plain", (), "")
    assert (cut.content, cut.calls) == (texts[2], ()) and cut.error.startswith("JSONDecodeError: ")
    assert (number.content, number.calls) == (texts[3], ()) and number.error == "the arguments of add are no JSON object"
    assert one.calls == (("add", '{"a": 1}'),) and not one.error, "one text says nothing of the next"
    listed, called = rollout.parse_tools(["[add(a=1), add(a='x')]", "[add(a=f())]"], "pythonic", [tool])
    assert listed.calls == (("add", '{"a": 1}'), ("add", '{"a": "x"}')) and "literals" in called.error
    (rubbish,) = rollout.parse_tools(["<tool_call>rubbish</tool_call>"], "qwen3_xml", [tool])
    assert rubbish.error and not rubbish.calls
    with pytest.raises(ValueError, match="no parser 'herms'; did you mean 'hermes'"):
        rollout.parse_tools(texts, "herms", [tool])
    with pytest.raises(ValueError, match="'llama3_json' does not fit the tokenizer"):
        rollout.parse_tools(texts, "llama3_json", [tool])
