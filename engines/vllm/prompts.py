"""Make prompts and sampling parameters for vLLM."""

from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from engines.batch.samples import Request, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec


def make_prompt(request: Request, model: ModelSpec) -> TokensPrompt:
    """Make vLLM's form of a request's prompt, with one token for each image, which vLLM expands.

    Raises:
        ValueError: an image cannot be read.
    """
    if not request.images:
        return TokensPrompt(prompt_token_ids=list(request.token_ids))
    from engines.images import prompts  # text needs no module of images

    return TokensPrompt(**prompts.make_prompt(request, model))


def make_params(sampling: Sampling, count: int, model: ModelSpec, config: VllmConfig) -> SamplingParams:
    """Make vLLM's parameters for ``count`` completions; greedy completions and scores ignore top_k, top_p and min_p."""
    greedy, kept = sampling.temperature == 0, dict[str, Any]()
    if config.top_k and not greedy and not sampling.scores_prompt:
        kept = {"top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
    if not sampling.scores_prompt:
        kept["min_tokens"] = min(config.min_new_tokens, sampling.max_tokens)
        kept["stop"] = list(config.stop) or None
    return SamplingParams(
        n=count,
        temperature=sampling.temperature,
        max_tokens=1 if sampling.scores_prompt else sampling.max_tokens,
        prompt_logprobs=0 if sampling.scores_prompt else None,
        # All ids that are kept: logprobs of the others are -inf.
        logprobs=None if greedy else max(sampling.top_logprobs, kept.get("top_k", 0)),
        flat_logprobs=not greedy,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # vLLM would stop at the end tokens of generation_config.json too
        detokenize=bool(kept.get("stop")),  # stop texts are looked for in the text
        logit_bias=dict.fromkeys(model.banned_tokens, float("-inf")) or None,
        **kept,
    )
