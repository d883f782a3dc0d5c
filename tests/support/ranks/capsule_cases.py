"""Steps of a training engine that are kept, and twelve differences that a replay must name."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from engines.batch.batch import TrainBatch
from engines.images.columns import make_image_columns
from engines.models.spec import ModelSpec
from hardware.attention.cell import Patch


def make_groups(vocab: int, groups: int = 2, samples: int = 3) -> TrainBatch:
    """Make groups of samples of one prompt, with logprobs of the rollout and an advantage of each sample."""
    generator = np.random.default_rng(0)
    sequences, prompts = [], []
    for group in range(groups):
        prompt = generator.integers(3, vocab, 9 + group).tolist()
        prompts += [len(prompt)] * samples
        sequences += [
            prompt + generator.integers(3, vocab, int(n)).tolist() for n in generator.integers(4, 20, samples)
        ]
    return add_columns(TrainBatch.from_ids(sequences, prompts))


def make_image_groups(model: ModelSpec, paths: list[str], samples: int = 3) -> TrainBatch:
    """Make groups of samples of prompts with one image and two."""
    from support.ranks.vlm_cases import make_prompts

    generator, sequences, shown = np.random.default_rng(0), [], []
    prompts = make_prompts(model, paths, ((0,), (1, 3)))
    for prompt in prompts:
        for count in generator.integers(4, 12, samples):
            sequences.append([*prompt.token_ids, *generator.integers(10, 85, count).tolist()])
            shown.append(prompt.images)
    lengths = [len(prompt.token_ids) for prompt in prompts for _ in range(samples)]
    return add_columns(TrainBatch.from_ids(sequences, lengths, **make_image_columns(sequences, shown, model.vision)))


def add_columns(batch: TrainBatch) -> TrainBatch:
    """Add the columns that a loss of the run reads: each sample's advantage, and the rollout's distance in logprobs."""
    generator = torch.Generator().manual_seed(0)
    advantages = batch.repeat_per_token(torch.randn(len(batch), generator=generator))
    logprobs = 0.1 * torch.rand(batch.num_tokens, generator=generator)
    return replace(batch, advantages=advantages, rollout_logprobs=logprobs, weights=batch.mask.float())


# -- differences, each planted within the engine's own code


def plant_difference(rank: int, world: int, name: str, place: tuple[int, int]) -> None:
    """Plant a difference into this rank's engine; ``place`` is a sequence of the micro-batch and a position."""
    from support.ranks.pool_group import HELD

    engine = HELD["worker"].engines["actor"]
    patches = DIFFERENCES[name](engine, place)
    for owner, attribute, wrap in patches:
        patch.object(owner, attribute, wrap(getattr(owner, attribute))).start()


def mend_difference(rank: int, world: int) -> None:
    patch.stopall()


def _change_weight(engine, place) -> list[Patch]:
    """Scale a projection of layer 3 by 1.01."""
    for layer in engine.decoder.decoder.layers:
        if layer.layer_number == 3:
            layer.mlp.linear_fc2.weight.data.mul_(1.01)
    return []


def _change_rope(engine, place) -> list[Patch]:
    from engines.probes.faults import REAL_FAULTS

    return REAL_FAULTS["a rotary base of twice the size"].patches()


def _change_norm(change: Callable) -> Callable:
    def make(engine, place) -> list[Patch]:
        norms = [layer.pre_mlp_layernorm for layer in engine.decoder.decoder.layers if layer.layer_number == 2]
        return [(norm, "forward", lambda forward, norm=norm: lambda x: change(norm, forward, x)) for norm in norms]

    return make


def _with_other_eps(norm, forward, x):
    with patch.object(norm, "eps", 100 * norm.eps):
        return forward(x)


def _change_mask(engine, place) -> list[Patch]:
    """Hide the first token from a token."""
    from hardware.attention import grouped_sdpa

    def wrap(build):
        def build_with_a_hole(spec, rule, members, query, keys):
            mask = build(spec, rule, members, query, keys)
            if mask is None:
                mask = torch.from_numpy(query[:, None] >= np.arange(keys))[None, None]
            if place[0] in members and place[1] in query:
                mask = mask.expand(len(members), -1, -1, -1).clone()
                mask[list(members).index(place[0]), 0, list(query).index(place[1]), 0] = False
            return mask

        return build_with_a_hole

    return [(grouped_sdpa, "build_dense_mask", wrap)]


def _change_window(engine, place) -> list[Patch]:
    from hardware.attention import grouped_sdpa

    return [
        (
            grouped_sdpa,
            "build_dense_mask",
            lambda build: lambda spec, rule, *a: build(spec, replace(rule, window=6), *a),
        )
    ]


def _change_column(function: str, column: str, change: Callable) -> Callable:
    """Change a column of a micro-batch at one place, where the engine's function takes it."""

    def make(engine, place) -> list[Patch]:
        def wrap(call):
            def call_changed(*args):
                number = next(i for i, value in enumerate(args) if isinstance(value, TrainBatch))
                micro = args[number]
                if micro.inputs.device.type != "meta" and len(micro) > place[0]:
                    values = getattr(micro, column).clone()
                    at = sum(micro.lengths[: place[0]]) + place[1]
                    values[at] = change(values[at])
                    args = (*args[:number], replace(micro, **{column: values}), *args[number + 1 :])
                return call(*args)

            return call_changed

        return [(engine, function, wrap)]

    return make


def _change_advantage(engine, place) -> list[Patch]:
    """Change the sign of a sequence's advantage."""
    from engines.batch.shard import Shard

    def wrap(cut):
        def cut_changed(self):
            first, *others = cut(self)
            start = sum(first.lengths[: place[0]])
            advantages = first.advantages.clone()
            advantages[start : start + first.lengths[place[0]]] *= -1
            return [replace(first, advantages=advantages), *others]

        return cut_changed

    return [(Shard, "micro_batches", wrap)]


def _change_pixels(engine, place) -> list[Patch]:
    """Change a pixel of every image."""
    if "vision" not in engine.extensions:
        return []

    def wrap(make_patches):
        def make_changed(images):
            patches = make_patches(images).clone()
            patches[:, 0] += 0.5
            return patches

        return make_changed

    return [(engine.extensions["vision"].processor, "patches", wrap)]


def _change_temperature(engine, place) -> list[Patch]:
    return [(engine, "temperature", lambda value: 1.01 * value)]


DIFFERENCES: dict[str, Callable] = {
    "a layer's weight": _change_weight,
    "the rope base": _change_rope,
    "a norm's eps": _change_norm(_with_other_eps),
    "a norm in bf16": _change_norm(lambda norm, forward, x: forward(x.bfloat16()).to(x.dtype)),
    "a mask cell": _change_mask,
    "a window": _change_window,
    "a token id": _change_column("forward_micro_batch", "inputs", lambda token: token - 1),
    "a label": _change_column("outputs", "targets", lambda token: token - 1),
    "the temperature": _change_temperature,
    "an advantage's sign": _change_advantage,
    "an image's pixels": _change_pixels,
}
"""Difference -> ``make(engine, place)``, which returns the patches that plant it. The twelfth, two sequences exchanged
in the schedule, is planted where the schedule is made."""


def exchange_sequences(plan_schedule: Callable) -> Callable:
    """Return ``plan_schedule`` with the first sequences of two micro-batches exchanged."""

    def plan(*args, **keywords):
        schedule = plan_schedule(*args, **keywords)
        (first, second, *others), *replicas = ([micro.copy() for micro in replica] for replica in schedule.rows)
        first[0], second[0] = second[0], first[0]
        return replace(schedule, rows=((first, second, *others), *replicas))

    return plan
