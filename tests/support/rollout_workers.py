"""Workers with rollout engines, asked from a test, and their answers as a test writes them down. Ray is imported by the
first question."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engines.batch.samples import Completion, Image, Request, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from engines.weight_digest import DigestPlan
from engines.weight_sync import pack_buckets
from hardware.vllm_versions import Feature


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Leave out what the installed vLLM lacks; ``tests/hardware/test_vllm_versions.py`` shows that it is refused."""
    return pytest.mark.skipif(not feature.is_there, reason=f"{feature.name} came with vLLM {feature.since}")


@contextmanager
def start_engine(model: ModelSpec, config: VllmConfig) -> Iterator[Any]:
    """Start a rollout engine on a CPU, which ends with the context; yields its worker."""
    from rlworker.cluster.rollout_group import Rollouts

    with Rollouts("cpu", 1) as rollouts:
        (worker,) = rollouts.start(model, config).wait().workers
        yield worker


def make_requests(prompts: Sequence[Prompt], sampling: Sampling) -> list[Request]:
    return [Request(prompt.token_ids, sampling, prompt.images) for prompt in prompts]


def ask(method, *args) -> Any:
    """Call a method of a worker, such as ``worker.sample``, and wait for what it returns."""
    import ray

    return ray.get(method.remote(*args))


def draw(worker, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
    """Have a worker sample completions of prompts, by the stream's own seed."""
    return ask(worker.sample, make_requests(prompts, sampling), sampling.seed)


def send(worker, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = 2**30) -> int:
    """Send weights as the next version, which is returned."""
    version = ask(worker.get_version) + 1
    for bucket, last in pack_buckets(iter(weights), bucket_bytes):
        ask(worker.load_weights, bucket, version, last)
    return version


def find_unlike(worker, weights: Iterable[tuple[str, Tensor]], columns: int = 0, dtype: str = "float32") -> set[str]:
    """Find the weights that a worker's engine computes with and that are not these, of all or of some columns."""
    plan, sent = DigestPlan(dtype, columns, seed=7), {}
    for _ in plan.digest(weights, sent):
        pass
    read = ask(worker.digest_weights, plan)
    assert read.keys() == sent.keys()
    return {name for name, digest in sent.items() if read[name] != digest}


def begin(worker, requests: Sequence[Request], tokens: int, first: int = 0) -> None:
    """Hand in requests with keys from ``first`` on and step until the furthest of all has sampled so many tokens; the
    loop stays paused."""

    def advance(worker) -> None:
        worker.loop.pause()
        worker.loop.submit(list(enumerate(requests, first)))
        worker.loop.resume()
        states = worker.engine.llm.llm_engine.output_processor.request_states
        for _ in range(1000):  # a step goes before each call
            if worker.loop.call(count_tokens, states) >= tokens:
                return worker.loop.pause()
        raise RuntimeError(f"no request came to {tokens} tokens")

    def count_tokens(states) -> int:
        return max((state.detokenizer.num_output_tokens() for state in states.values()), default=0)

    ask(worker.__ray_call__, advance)


def resume(worker) -> None:
    """Go on after ``begin``; new weights do so too."""
    ask(worker.__ray_call__, lambda worker: worker.loop.resume())


def poll(worker):
    """Begin to wait for what finishes next, beside what the worker is asked otherwise; returns Ray's reference."""
    from rlworker.cluster.worker_pool import POLL

    return worker.take.options(concurrency_group=POLL).remote(60.0)


def take(worker, count: int) -> dict[Any, Any]:
    """Wait for so many requests that were handed in: by their keys, completions and errors."""
    import ray

    taken: dict[Any, Any] = {}
    while len(taken) < count:
        more = dict(ray.get(poll(worker)))
        assert more, "nothing has finished for a minute"
        taken |= more
    return taken


def update_in_flight(worker, requests: Sequence[Request], tokens: int, weights) -> list[Completion]:
    """Sample requests with new weights from about the token of this number on."""
    begin(worker, requests, tokens)
    send(worker, weights, 20_000)
    taken = take(worker, len(requests))
    return [completion for key in range(len(requests)) for completion in taken[key]]


def list_spans(completions: Iterable[Completion]) -> tuple[list[int], list[int]]:
    """List the version of each span of completions, and its length."""
    versions, lengths = zip(*(span for completion in completions for span in completion.spans), strict=True)
    return list(versions), list(lengths)


def make_completion(ids: Sequence[int], logprobs: Sequence[float] = (), version: int = 0) -> Completion:
    return Completion(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), True, ((version, len(ids)),))


def make_completions(*parts: tuple) -> list[Completion]:
    return [make_completion(*part) for part in parts]
