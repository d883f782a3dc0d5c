"""Rounds and free-running requests of a vLLM engine in its Ray process: what repeats, and what new weights do."""

import gzip
import json
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from support import rollout_workers
from support.huggingface import list_weights, load_folder, measure_differences, measure_versions, nudge
from support.models import VOCAB
from support.rollout_workers import (
    Prompt,
    ask,
    begin,
    draw,
    list_spans,
    needs,
    poll,
    resume,
    send,
    take,
    update_in_flight,
)

from engines.batch.samples import Request, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.vllm_versions import Feature
from rlworker.checks.tiny.models import make_tiny_text

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large]
CONFIG = VllmConfig(max_new_tokens=8, max_model_len=512, max_num_seqs=64, kv_cache_mb=128)
STOP = (2, 11, 12, 13, 14, 15)
AHEAD = Feature("streams on a CPU that can wait", since="0.25", without="it cannot be scheduled ahead there")
LABELS = Feature("InprocClient.set_weight_version", since="0.27", without="versions are counted by the project alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("long")
    return make_tiny_text(place, "qwen2", VOCAB, eos_token_id=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def rollouts(cluster, folder):
    """One engine."""
    from rlworker.cluster.rollout_group import Rollouts

    with Rollouts("cpu", 1) as rollouts:
        yield rollouts.start(ModelSpec.from_folder(folder), CONFIG).wait()


@pytest.fixture
def own(cluster):
    import ray

    from rlworker.cluster.worker_pool import POLL
    from rlworker.cluster.workers import RolloutWorker

    worker = ray.remote(concurrency_groups={POLL: 1})(RolloutWorker).options(num_cpus=0).remote("cpu", 0)
    yield worker
    ray.kill(worker)


def make_prompts(count: int, length: int, seed: int = 0) -> list[Prompt]:
    ids = np.random.default_rng(seed).integers(20, 99, (count, length))
    return [Prompt(tuple(row)) for row in ids.tolist()]


def make_requests(prompts, tokens: int, stop=()) -> list[Request]:
    return rollout_workers.make_requests(prompts, Sampling(1, 1.0, tokens, (), stop))


def leave_caches(worker, left: bool) -> None:
    """Leave the caches as they are when new weights come, or empty them again."""
    if left:
        worker.engine._empty_caches = lambda: None
    else:
        del worker.engine._empty_caches


def test_new_weights_in_flight_are_those_of_the_next_token(rollouts, folder, measured):
    """Both segments of a completion are HuggingFace's under their own weights; with the old keys the second is not.

    Two completions share a prompt, before and after.
    """
    (worker,) = rollouts.workers
    prompts, old, new = make_prompts(4, 150) * 2, load_folder(folder), nudge(load_folder(folder))
    for left in (False, True):
        first = send(worker, list_weights(old))
        if left:
            ask(worker.__ray_call__, leave_caches, True)
        completions = update_in_flight(worker, make_requests(prompts, 200), 100, list_weights(new))
        if left:
            ask(worker.__ray_call__, leave_caches, False)
        versions, lengths = list_spans(completions)
        assert versions == [first, first + 1] * 8 and min(lengths) > 90
        before, after = measure_versions({first: old, first + 1: new}, prompts, completions).values()
        measured({"mean after, keys kept" if left else "mean after": float(after.mean())})
        measured({"mean before": float(before.mean()), "largest before": float(before.max())})
        assert before.mean() <= 2e-6 and before.max() <= 1e-4
        assert (after.mean() <= 2e-6 and after.max() <= 1e-4) if not left else after.mean() > 1e-3


def label_too(worker) -> None:
    """Have vLLM label tokens with the versions of their weights as well, and keep its labels beside ours."""
    engine, labels = worker.engine, []
    core, change, read = engine.llm.llm_engine.engine_core, engine._versions.change, engine.read_output

    def change_both(version: int) -> None:
        core.set_weight_version(str(version))
        change(version)

    def read_both(request, output):
        completions = read(request, output)
        theirs = [[(int(span.version), span.end - span.start) for span in s.weight_versions] for s in output.outputs]
        labels.append(([[*completion.spans] for completion in completions], theirs))
        return completions

    core.set_weight_version(str(engine.version))
    engine._versions.change, engine.read_output, worker.labels = change_both, read_both, labels


def stop_labels(worker) -> list[tuple]:
    del worker.engine._versions.change, worker.engine.read_output
    return worker.labels


@needs(LABELS)
def test_versions_are_those_that_vllm_counts_itself(rollouts, folder):
    """Samples of a prompt end before, between and after two updates; one request is aborted between them."""
    (worker,), hf = rollouts.workers, load_folder(folder)
    send(worker, list_weights(hf))
    ask(worker.__ray_call__, label_too)
    sampling = Sampling(6, 1.0, 120, (), STOP)
    begin(worker, rollout_workers.make_requests(make_prompts(6, 40), sampling), 20)
    send(worker, list_weights(hf), 20_000)
    ask(worker.abort, [5])
    begin(worker, rollout_workers.make_requests(make_prompts(2, 30, seed=1), replace(sampling, max_tokens=60)), 26, 6)
    send(worker, list_weights(hf), 20_000)
    assert take(worker, 7).keys() == {0, 1, 2, 3, 4, 6, 7}
    labels = ask(worker.__ray_call__, stop_labels)
    assert all(ours == theirs for ours, theirs in labels)
    counts = {len(spans) for ours, _ in labels for spans in ours}
    assert min(counts) == 1 and max(counts) > 1, "some have seen an update, and some none"


def test_a_round_of_single_requests_is_that_of_prompts_and_repeats_whatever_came_before(rollouts, folder):
    (worker,), prompts, stream = rollouts.workers, make_prompts(6, 140), (3, 1)
    send(worker, list_weights(load_folder(folder)))
    grouped = [request for request in make_requests(prompts, 8, STOP) for _ in range(4)]
    first = rollouts.sample(grouped, stream)
    assert first == draw(worker, prompts, Sampling(4, 1.0, 8, (*stream, 0), STOP)), "bit for bit"
    begin(worker, make_requests(make_prompts(9, 150, 2), 30), 3)
    with pytest.raises(RuntimeError, match=r"sample\(\) needs the engine for itself"):
        rollouts.sample(grouped, stream)
    ask(worker.abort, range(4))
    resume(worker)
    assert take(worker, 5).keys() == set(range(4, 9))
    assert rollouts.sample(grouped, stream) == first
    assert rollouts.sample(grouped, (3, 2)) != first


def test_each_request_has_its_own_limits(rollouts):
    prompts, stops = make_prompts(40, 5), [(number,) for number in range(20, 60)]
    settings = [Sampling(1, 1.0, 1 + number % 7, (), stop) for number, stop in enumerate(stops)]
    settings.append(Sampling(1, 1.0, 300, (), tuple(range(3, 99))))
    asked = [Request(p.token_ids, each) for p, each in zip([*prompts, prompts[0]], settings, strict=True)]
    completions = rollouts.sample(asked, (1,))
    for one, each in zip(completions, settings[:-1], strict=False):
        ended = one.token_ids[-1] in each.stop_token_ids
        assert one.finished == ended and (ended or len(one.token_ids) == each.max_tokens)
        assert not set(one.token_ids[:-1].tolist()) & set(each.stop_token_ids)
    assert completions[40].finished and len(completions) == 41


def test_what_is_given_up_is_free_and_a_poll_holds_nothing_up(rollouts):
    import ray

    (worker,), requests = rollouts.workers, make_requests(make_prompts(64, 150), 300)

    def find_use(worker) -> tuple[int, float]:
        core = worker.engine.llm.llm_engine.engine_core.engine_core
        return worker.loop.call(lambda: (len(core.scheduler.requests), core.scheduler.kv_cache_manager.usage))

    begin(worker, requests, 3)
    waiting = poll(worker)
    count, used = ask(worker.__ray_call__, find_use)
    assert count == 64 and used > 0.1
    ask(worker.abort, range(64))
    assert ask(worker.__ray_call__, find_use) == (0, 0.0)
    resume(worker)
    short = replace(requests[0], sampling=replace(requests[0].sampling, max_tokens=2))
    ask(worker.submit, [("next", short)])
    ((key, completions),) = ray.get(waiting)
    assert key == "next" and [len(completion.token_ids) for completion in completions] == [2]
    ask(worker.submit, [("long", Request(tuple(range(20, 90)) * 8, Sampling(1, 1.0, 2, (), ())))])
    (error,) = take(worker, 1).values()
    assert isinstance(error, ValueError) and "a request cannot be sampled: " in str(error) and "512" in str(error)


def test_a_trace_shows_what_the_engine_computed(rollouts, tmp_path):
    (worker,), path = rollouts.workers, tmp_path / "trace.json.gz"
    ask(worker.begin_trace, "rollout")
    rollouts.sample(make_requests(make_prompts(2, 5), 3), (1,))
    ask(worker.end_trace, str(path))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    (phase,) = (span for span in spans if span["name"] == "phase rollout")
    products = [span for span in spans if span["name"].startswith("aten::") and span["tid"] == phase["tid"]]
    assert len(products) > 100, "a trace is of the thread that computes"


@needs(AHEAD)
def test_new_weights_come_behind_what_vllm_computes_ahead(own, folder, measured):
    """With the scheduler that vLLM has elsewhere than on a CPU: each step begins before the one before it was read."""

    def schedule_ahead(worker) -> None:
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config

        def check_otherwise(config) -> None:
            check(config)
            config.scheduler_config.async_scheduling = True

        patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_otherwise)).start()

    def count_batches(worker) -> int:
        return len(worker.engine.llm.llm_engine.engine_core.engine_core.batch_queue)

    ask(own.__ray_call__, schedule_ahead)
    ask(own.start, ModelSpec.from_folder(folder), CONFIG)
    prompts, models = make_prompts(8, 150), {0: load_folder(folder), 1: nudge(load_folder(folder))}
    requests = make_requests(prompts, 200)
    begin(own, requests, 50)
    assert ask(own.__ray_call__, count_batches) == 0, "nothing is under way in a pause"
    resume(own)
    ask(own.abort, range(8))
    completions = update_in_flight(own, requests, 100, list_weights(models[1]))
    versions, lengths = list_spans(completions)
    assert versions == [0, 1] * 8 and min(lengths) > 90
    found = measure_versions(models, prompts, completions)
    measured({f"mean, version {version}": float(values.mean()) for version, values in found.items()})
    assert all(values.mean() <= 2e-6 and values.max() <= 1e-4 for values in found.values())
    assert ask(own.sample, requests, 1) == ask(own.sample, requests, 1)


def test_an_engine_that_breaks_tells_all_who_wait(own, folder):
    """Sixty-four requests, a poll, and whoever comes later."""
    import ray

    def break_step(worker) -> None:
        patch.object(worker.engine, "step", side_effect=RuntimeError("device lost")).start()

    ask(own.start, ModelSpec.from_folder(folder), CONFIG)
    begin(own, make_requests(make_prompts(64, 20), 400), 3)
    waiting = poll(own)
    ask(own.__ray_call__, break_step)
    began = time.monotonic()
    resume(own)
    with pytest.raises(RuntimeError, match="loop has ended: RuntimeError: device lost"):
        ray.get(waiting)
    for reference in (own.abort.remote([0]), own.submit.remote([]), own.sample.remote([], 0)):
        with pytest.raises(RuntimeError, match="loop has ended: RuntimeError: device lost"):
            ray.get(reference)
    assert time.monotonic() - began < 1.0


@pytest.mark.product
def test_a_round_survives_the_loss_of_an_engine(cluster, folder):
    """Requests go to two engines, one is killed while it samples, and another one samples what it had."""
    import ray

    from rlworker.cluster.rollout_group import Rollouts

    requests = [request for request in make_requests(make_prompts(40, 30), 200) for _ in range(2)]
    lost: dict = {}
    with Rollouts("cpu", 2) as rollouts:
        rollouts.start(ModelSpec.from_folder(folder), CONFIG).wait()
        rollouts.replace_lost(lost.update, lambda workers: None)
        want = rollouts.sample(requests, (1,))
        killing = threading.Timer(0.1, ray.kill, rollouts.workers[1:])
        killing.start()
        assert rollouts.sample(requests, (1,)) == want
        killing.join()
    assert lost.keys() == {"rollout engine 1"}
    prompts = [Prompt(request.token_ids) for request in requests]
    assert measure_differences(load_folder(folder), prompts, want).mean() <= 2e-6, "each behind its own prompt"


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_calls_of_tools_are_read_where_vllm_is_and_faults_are_answers(rollouts):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    texts = [f"so {CALL}{CALL}", "plain", CALL[:30], '<tool_call>{"name": "add", "arguments": 3}</tool_call>', CALL]
    two, plain, cut, number, one = rollouts.parse_tools(texts, "hermes", [tool])
    assert two.content == "so " and two.calls == (("add", '{"a": 1}'),) * 2 and not two.error
    assert (plain.content, plain.calls, plain.error) == ("plain", (), "")
    assert (cut.content, cut.calls) == (texts[2], ()) and cut.error.startswith("JSONDecodeError: ")
    assert (number.content, number.calls) == (
        texts[3],
        (),
    ) and number.error == "the arguments of add are no JSON object"
    assert one.calls == (("add", '{"a": 1}'),) and not one.error, "one text says nothing of the next"
    json_alone, no_tag, answer = rollouts.parse_tools([CALL[11:-12], CALL[11:], '{"sum": 1}'], "hermes", [tool])
    assert json_alone.error == no_tag.error == "the JSON of a call of 'add' stands without the marks of a call"
    assert (json_alone.content, json_alone.calls) == (CALL[11:-12], ()) and not answer.error
    listed, called = rollouts.parse_tools(["[add(a=1), add(a='x')]", "[add(a=f())]"], "pythonic", [tool])
    assert listed.calls == (("add", '{"a": 1}'), ("add", '{"a": "x"}')) and "literals" in called.error
    (rubbish,) = rollouts.parse_tools(["<tool_call>rubbish</tool_call>"], "qwen3_xml", [tool])
    assert rubbish.error and not rubbish.calls
    with pytest.raises(ValueError, match="no parser 'herms'; did you mean 'hermes'"):
        rollouts.parse_tools(texts, "herms", [tool])
    with pytest.raises(ValueError, match="'llama3_json' does not fit the tokenizer"):
        rollouts.parse_tools(texts, "llama3_json", [tool])
