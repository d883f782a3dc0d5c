"""A head that scores a share of the tokens of a probe, whose copies of sequences would make too many logits."""

import contextlib
from unittest.mock import patch

import torch
from torch import Tensor

from engines.batch.shard import TokenOutputs
from engines.megatron import engine as engine_module
from engines.megatron.engine import MegatronEngine

_PASS_LOGITS = 2**26
"""Most logits that one pass makes."""


@contextlib.contextmanager
def scoring_some(engine: MegatronEngine):
    """Let the head score every n-th token, as many as ``_PASS_LOGITS`` allows. Of the others, each of which it would
    take by itself, two sums of the last hidden state stand in for logprob and entropy."""
    score = engine_module.score_tokens

    def score_some(hidden: Tensor, weight: Tensor, target: Tensor, **settings) -> TokenOutputs:
        rows = slice(None, None, max(1, -(-len(hidden) * engine.model.vocab // _PASS_LOGITS)))
        found = score(hidden[rows], weight, target[rows], **settings)
        states = hidden.float()
        outputs = TokenOutputs(states.sum(-1), states @ torch.linspace(1, 2, states.shape[1], device=states.device))
        outputs.logprobs[rows], outputs.entropy[rows] = found.logprobs, found.entropy
        return outputs

    with patch.object(engine_module, "score_tokens", score_some):
        yield
