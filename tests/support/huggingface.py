"""Logprobs by HuggingFace: of a batch, and of what a rollout engine has sampled.

The computation itself is ``rlworker.checks.huggingface``, one sequence at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completion, Prompt
from engines.models.spec import ModelSpec
from rlworker.checks.huggingface import image_arguments, load_huggingface, logits_by_sequence, token_outputs
from rlworker.data.rows import Row
from rlworker.rollouts.to_batch import to_batch


def load_folder(folder: str):
    """Load the language model of a folder."""
    return load_huggingface(ModelSpec.from_folder(folder))


@torch.no_grad()
def logprobs_of(model, batch: TrainBatch, temperature: float = 1.0, spec: ModelSpec | None = None) -> Tensor:
    """Compute the logprob of every target, ``[N]`` float32.

    Args:
        spec: of a model that sees images.
    """
    if spec is None:
        runs, banned = logits_by_sequence(model, batch), ()
    else:
        runs, banned = logits_by_sequence(model, batch, image_arguments(spec)), spec.banned_tokens
    return torch.cat([token_outputs(logits, one.targets, banned, temperature).logprobs for one, logits in runs])


def batch_of(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], spec: ModelSpec | None = None
) -> TrainBatch:
    """Lay sampled completions ``[P][count]`` behind their prompts; ``mask`` has the sampled tokens.

    Args:
        spec: of a model that sees images.
    """
    rows = [Row("", prompt.token_ids, "", {}, prompt.images) for prompt in prompts]
    samples = sum(map(len, completions))
    return to_batch(rows, completions, [0.0] * samples, spec.vision if spec else None)


def differences(
    model,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    temperature: float = 1.0,
    spec: ModelSpec | None = None,
) -> Tensor:
    """Compare the logprobs that tokens were sampled with: ``|rollout - HuggingFace|`` of each sampled token."""
    batch = batch_of(prompts, completions, spec)
    return (batch.rollout_logprobs - logprobs_of(model, batch, temperature, spec))[batch.mask].abs()
