"""Convert vLLM's outputs to completions, and count which weights sampled each of their tokens."""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from engines.batch.samples import Completion
from engines.models.spec import ModelSpec
from hardware.megatron.form import NO_ROUTE

Spans = tuple[tuple[int, int], ...]
"""Version of the weights, and number of neighbouring tokens that they sampled; in order."""


class VersionCounter:
    """Counts how many tokens of each sample every version of the weights has sampled.

    vLLM's own labels are not used: not every version has them. When the weights change, the tokens of all running
    samples are counted; so a sample costs nothing while they stay. No forward pass may be under way at a change.

    Args:
        engine: vLLM's engine. version: of the weights that it has.
    """

    def __init__(self, engine: LLMEngine, version: int):
        self._engine = engine
        self._version = version
        self._counts: dict[str, list[tuple[int, dict[int, int]]]] = {}
        """Request -> for each earlier version, the tokens by its end of the samples that ran on, by their numbers."""

    def change(self, version: int) -> None:
        """Record that the weights are ``version`` from now on."""
        running: dict[str, dict[int, int]] = {}
        for state in self._engine.output_processor.request_states.values():
            assert state.detokenizer, "of each request that samples"
            name = state.parent_req.external_req_id if state.parent_req else state.external_req_id
            running.setdefault(name, {})[state.request_index] = state.detokenizer.num_output_tokens()
        for name, tokens in running.items():
            self._counts.setdefault(name, []).append((self._version, tokens))
        self._version = version

    def take(self, name: str, index: int, length: int) -> Spans:
        """Return which versions sampled the ``length`` tokens of a finished sample.

        Args:
            name: of the request. index: number of the sample in it.

        Raises:
            RuntimeError: it had more tokens than that when the weights changed.
        """
        spans, counted = [], 0
        for version, tokens in self._counts.get(name, ()):
            if index not in tokens:  # it had finished by then
                spans.append((version, length - counted))
                counted = length
                break
            spans.append((version, tokens[index] - counted))
            counted = tokens[index]
        else:
            spans.append((self._version, length - counted))
        if any(count < 0 for _, count in spans):
            raise RuntimeError(
                f"rollout: sample {index} of request {name!r} had {counted} tokens when the weights changed, and has "
                f"{length} now that it has finished; expected at least as many"
            )
        return tuple((version, count) for version, count in spans if count)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the counts of requests that were read or aborted."""
        for name in names:
            self._counts.pop(name, None)


def decode_routes(routed: np.ndarray | None, model: ModelSpec) -> np.ndarray:
    """Decode the experts that vLLM returned of a sample's tokens, but the last: ``[tokens, layers, k]`` int16.

    vLLM numbers all layers, and leaves zeros in those without experts.

    Args:
        routed: ``[tokens, layers, k]``, uint8 or uint16.

    Raises:
        RuntimeError: vLLM returned none, or those of another model.
    """
    assert model.experts, "checked with the settings"
    count, chosen = model.experts.count, model.experts.chosen
    if routed is None or routed.ndim != 3 or routed.shape[1:] != (model.layers, chosen):
        shape = None if routed is None else routed.shape
        raise RuntimeError(
            f"rollout: vLLM returned experts {shape} of a sample, expected [tokens, {model.layers}, {chosen}]; install "
            "the version in requirements, or leave --rollout.replay-routes out"
        )
    routes = routed.astype(np.int16)
    routes[:, [kind.options.experts is None for kind in model.kinds]] = NO_ROUTE
    if routes.size and routes.max() >= count:
        raise RuntimeError(f"rollout: vLLM returned expert {routes.max()} of a token, expected below {count}")
    return routes


def cut_routes(completion: Completion, prompt: int, routes: np.ndarray) -> Completion:
    """Return a completion with the recorded experts ``[tokens, layers, k]`` of its prompt and itself.

    Raises:
        RuntimeError: those of some tokens are missing.
    """
    need = prompt + len(completion.token_ids) - 1
    if len(routes) < need:
        raise RuntimeError(f"rollout: experts of {len(routes)} tokens were recorded, expected of {need}")
    return replace(completion, routes=routes[:need])


def read_completion(sample: CompletionOutput, spans: Spans) -> Completion:
    """Read a sampled completion, whose tokens have ``spans``, and check that every token has a logprob."""
    tokens = np.asarray(sample.token_ids, dtype=np.int32)
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


def read_scores(output: RequestOutput, version: int) -> Completion:
    """Read the logprobs of a prompt's ids from the second on, as the weights of ``version`` give them."""
    tokens = np.asarray(output.prompt_token_ids, dtype=np.int32)[1:]
    found = cast(FlatLogprobs, output.prompt_logprobs)
    if not np.array_equal(found.token_ids, tokens):
        raise RuntimeError("rollout: vLLM reported logprobs of other tokens than the prompt's")
    return Completion(tokens, np.asarray(found.logprobs, dtype=np.float32), False, ((version, len(tokens)),))
