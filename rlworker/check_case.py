"""What a check runs on: sequences of awkward lengths, and a tiny model where none is given."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.batch import TrainBatch
from engines.models import ModelSpec
from engines.probe_case import ProbeCase

_LENGTHS = (9, 1, 14, 0, 6, 9, 21)
_IMAGES = {0: ((1, 3), (5, 8)), 2: ((4, 9), (9, 12)), 6: ((0, 2),)}
"""Sequence -> where its images are; two lie side by side."""
_PREFIXES = (3, 1, 5, 0, 2, 0, 4)
_ALL_COLUMNS, _FEW_COLUMNS = 200, 12
"""In a stream of at most so many tokens each one's influence is looked for; in a longer one, that of so many."""


@dataclass(frozen=True)
class Case:
    """Sequences to check with.

    Attributes:
        probe: what masks are probed with. batch: what numbers are compared on.
        denominator: of the loss. prompts: what the rollout engine continues.
    """

    probe: ProbeCase
    batch: TrainBatch
    denominator: float
    prompts: list[tuple[int, ...]]


def make_case(model: ModelSpec, replicas: int) -> Case:
    """Sequences for a model: longer than its windows, within its positions; as many for each data-parallel replica.

    Raises:
        ValueError: the model has too few positions.
    """
    lengths = _LENGTHS
    if max(lengths) >= model.max_positions:
        raise ValueError(f"check: the model has {model.max_positions} positions, expected more than {max(lengths)}")
    windows = [rule.window for rule in model.rules if rule.window is not None]
    if windows:
        lengths = (*_LENGTHS, min(max(windows) + 6, model.max_positions - 1))
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, model.vocab, (n + 1,), generator=generator).tolist() for n in lengths * replicas]
    batch = TrainBatch.from_ids(ids, [1 + min(i % 3, len(s) - 1) for i, s in enumerate(ids)])
    advantages = torch.randn(batch.num_tokens, generator=generator)
    batch = TrainBatch(lengths=batch.lengths, **batch.columns() | {"advantages": advantages})
    return Case(
        _probe_case(lengths), batch, float(batch.mask.sum()), [tuple(s[:4]) for s in ids[: len(lengths)] if len(s) > 4]
    )


def _probe_case(lengths: tuple[int, ...]) -> ProbeCase:
    blocks = []
    for i, n in enumerate(lengths):
        own = [-1] * n
        for number, (start, stop) in enumerate(_IMAGES.get(i, ())):
            own[start:stop] = [number] * (stop - start)
        blocks += own
    tokens = sum(lengths)
    columns = range(tokens)
    if tokens > _ALL_COLUMNS:  # the ends of sequences and of the window of the last token
        ends = [sum(lengths[:i]) for i in range(1, len(lengths))]
        edges = {tokens - 1, tokens - 6, tokens - 7, tokens - lengths[-1] + 5, tokens - lengths[-1] + 6, *ends[-4:]}
        columns = sorted(edges | {end - 1 for end in ends[-4:] if end})[:_FEW_COLUMNS]
    prefixes = (*_PREFIXES, *(0 for _ in lengths[len(_PREFIXES) :]))
    return ProbeCase(lengths, tuple(columns), tuple(blocks), prefixes)


def tiny_model() -> tempfile.TemporaryDirectory:
    """A folder with a tiny Qwen2 of random weights: tied, with biases, and grouped key-value heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=131,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # biases and norms are born alike; a swapped pair would go unseen
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tempfile.TemporaryDirectory(prefix="rlworker-check-")
    model.save_pretrained(Path(folder.name))
    return folder
