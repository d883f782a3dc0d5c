"""Convert vLLM's outputs to completions."""

from dataclasses import replace
from typing import cast

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from engines.batch.samples import Completion


def cut_routes(completion: Completion, prompt: int, routes: np.ndarray) -> Completion:
    """Return a completion with the recorded experts ``[tokens, layers, k]`` of its prompt and itself.

    Raises:
        RuntimeError: those of some tokens are missing.
    """
    need = prompt + len(completion.token_ids) - 1
    if len(routes) < need:
        raise RuntimeError(f"rollout: experts of {len(routes)} tokens were recorded, expected of {need}")
    return replace(completion, routes=routes[:need])


def read_completion(sample: CompletionOutput) -> Completion:
    """Read a sampled completion, and check that every token has a weight version and a logprob."""
    tokens = np.asarray(sample.token_ids, dtype=np.int32)
    spans = tuple((int(span.version), span.end - span.start) for span in sample.weight_versions or ())
    if sum(length for _, length in spans) != len(tokens):
        raise RuntimeError(f"rollout: vLLM gave versions {spans} of {len(tokens)} sampled tokens, expected of each")
    finished, found = sample.finish_reason == "stop", cast(FlatLogprobs | None, sample.logprobs)
    if found is None:
        return Completion(tokens, np.zeros(0, np.float32), finished, spans)
    # At each position vLLM reports the sampled token, then the likeliest tokens, which may include it.
    ids = np.asarray(found.token_ids, dtype=np.int32).reshape(len(tokens), -1)
    logprobs = np.asarray(found.logprobs, dtype=np.float32).reshape(ids.shape)
    if not np.array_equal(ids[:, 0], tokens):
        raise RuntimeError("rollout: vLLM reported logprobs of other tokens than it sampled")
    if ids.shape[1] == 1:
        return Completion(tokens, logprobs[:, 0], finished, spans)
    # Banned tokens fill up the rest.
    top_ids = np.where(logprobs > -np.inf, ids, -1)[:, 1:]
    return Completion(tokens, logprobs[:, 0].copy(), finished, spans, top_ids, logprobs[:, 1:])


def read_scores(output: RequestOutput) -> Completion:
    """Read the logprobs of a prompt's ids from the second on; the version is that of the id sampled after it."""
    tokens = np.asarray(output.prompt_token_ids, dtype=np.int32)[1:]
    found = cast(FlatLogprobs, output.prompt_logprobs)
    if not np.array_equal(found.token_ids, tokens):
        raise RuntimeError("rollout: vLLM reported logprobs of other tokens than the prompt's")
    (version, _), *_ = read_completion(output.outputs[0]).spans
    return Completion(tokens, np.asarray(found.logprobs, dtype=np.float32), False, ((version, len(tokens)),))
