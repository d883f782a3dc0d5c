"""Batches of groups, whose samples begin alike, and what ranks compute of them with each prompt once and G times."""

import dataclasses
from functools import partial

import torch
from support.huggingface import compute_padded_logits, name_gradients
from support.ranks.engines_cases import build_engine, plan
from support.ranks.vlm_cases import make_prompts
from support.rounding import Draw

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs, ValueOutputs, list_columns
from engines.images.columns import make_image_columns
from engines.models.spec import ModelSpec
from rlworker.algorithms.losses import policy_loss, truncated_importance
from rlworker.checks.reference.huggingface import (
    iterate_logits,
    load_huggingface,
    open_images,
    probe_loss,
    score_tokens,
)

GROUPS = ((9, 4), (5, 3), (14, 1), (3, 2), (7, 3))
"""Ids of each prompt, and how many samples it has; one group is a single sample."""
SAMPLED = (1, 2, 6, 11, 3, 8, 17)
"""Ids of each sample by turns; one of a single id has no input of its own."""


def make_grouped(model=None, seed: int = 1):
    """Make groups of samples, shuffled, some of two turns, among sequences that nobody begins like."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, 99, (count,), generator=generator).tolist()  # noqa: E731
    sequences, sampled = [draw(6), draw(13)], [[False] * 2 + [True] * 4, [False] * 2 + [True] * 11]
    for size, samples in GROUPS:
        prompt = draw(size)
        for sample in range(samples):
            count = SAMPLED[len(sequences) % len(SAMPLED)]
            turns = draw(7) if sample == 1 else []  # an environment answers with four ids, and the model goes on
            sequences.append(prompt + draw(count) + turns)
            sampled.append([False] * size + [True] * count + ([False] * 4 + [True] * 3 if turns else []))
    return _shuffle(sequences, generator, sampled=sampled)


def make_stale(model=None, seed: int = 1):
    """Make the groups of ``make_grouped`` with all that a policy loss of older samples reads, and weights of some
    targets that were not sampled."""
    batch, generator = make_grouped(model, seed), torch.Generator().manual_seed(seed)
    count, mask = batch.num_tokens, batch.mask
    noise = lambda *shape: 0.3 * torch.randn(*shape, generator=generator)  # noqa: E731
    old, likely = noise(count) - 4.6, torch.tensor([0.2, 0.1, 0.05, 0.65]).log() + noise(count, 4)
    ids = torch.rand(count, 97, generator=generator).argsort(1)[:, :3].int() + 1
    return dataclasses.replace(
        batch,
        old_logprobs=old,
        rollout_logprobs=old + noise(count),
        ref_logprobs=old + noise(count),
        rollout_top_ids=ids.masked_fill(~mask[:, None], -1),
        rollout_top_logprobs=(likely + noise(count, 4))[:, :3].clamp_max(-1.2).masked_fill(~mask[:, None], -torch.inf),
        old_top_logprobs=likely.log_softmax(1),
        weights=torch.where(mask | (torch.arange(count) % 5 == 0), 0.5 + noise(count).abs(), 0.0),
    )


def make_uneven(model=None, seed: int = 1):
    """Make a long sequence for one of two replicas, a short one and a group for the other, which do not fit together
    into a micro-batch of 40: the first has a dummy."""

    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, 99, (count,), generator=generator).tolist()  # noqa: E731
    prompt = draw(12)
    sequences = [draw(39), draw(22), prompt + draw(4), prompt + draw(6)]
    batch = TrainBatch.from_ids(sequences, [3, 9, 12, 12])
    return dataclasses.replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))


def make_forked(model=None, seed: int = 1):
    """Make groups whose prompts begin alike too, and samples that go on from a part of another's completion."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, 99, (count,), generator=generator).tolist()  # noqa: E731
    sequences, sampled, system = [], [], draw(11)
    for size, samples in GROUPS:
        prompt = system + draw(size)
        for sample in range(samples):
            own = draw(SAMPLED[len(sequences) % len(SAMPLED)])
            for ids in (own, own[: len(own) // 2] + draw(5)) if sample % 2 else (own,):
                sequences.append(prompt + ids)
                sampled.append([False] * len(prompt) + [True] * len(ids))
    return _shuffle(sequences, generator, sampled=sampled)


def make_grouped_images(paths, model, seed: int = 1):
    """Make groups of samples that go on from prompts with images and without; equal texts about other images too."""
    generator = torch.Generator().manual_seed(seed)
    prompts = make_prompts(model, paths, ((0,), (1, 2, 3), (), (4, 5), (0,)), seed)
    # The same ids and positions as the first, about an image of the same size.
    other = make_prompts(model, [paths[-1], *paths[1:]], ((0,),), seed)[0]
    sequences, sampled, images = [], [], []
    for row, prompt in enumerate([*prompts, other]):
        for sample in range((3, 2, 3, 2, 1, 2)[row]):
            count = (1, 4, 9, 2)[(row + sample) % 4]
            sequences.append([*prompt.token_ids, *torch.randint(10, 85, (count,), generator=generator).tolist()])
            sampled.append([False] * len(prompt.token_ids) + [True] * count)
            images.append(prompt.images)
    return _shuffle(sequences, generator, model, images, sampled=sampled)


def _shuffle(sequences, generator, model=None, images=(), *, sampled):

    order = torch.randperm(len(sequences), generator=generator).tolist()
    sequences, sampled, images = ([x[i] for i in order] if x else () for x in (sequences, sampled, images))
    columns = make_image_columns(sequences, images, model.vision) if images else {}
    batch = TrainBatch.from_ids(sequences, sampled=sampled, **columns)
    return dataclasses.replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))


def value_loss(outputs, batch):
    """Sum values, weighed by advantages, over the tokens that count: the gradient differs at each."""
    loss = (batch.advantages * outputs.values * batch.mask).sum()
    return loss, {"loss": loss.detach()}


def _choose_loss(model, batch):
    if model.head == "value":
        return value_loss
    if batch.old_logprobs is None:
        return probe_loss
    return partial(policy_loss, kl_coef=0.1, entropy_coef=0.01, correction=truncated_importance, center=True)


def compute_alone(draw: Draw, folder: str, head: str, make) -> dict:
    """Compute by HuggingFace outputs and gradients of the batch ``make(model)``, each sample by itself."""
    model = ModelSpec.from_folder(folder, head=head)
    batch = draw.cast(make(model))
    loss, see = _choose_loss(model, batch), open_images(model, batch, draw.dtype)
    with draw.computing():
        network = draw.load(partial(load_huggingface, model))
        if model.vision:
            logits = torch.cat([scores for _, scores in iterate_logits(network, batch, see)])
        else:
            logits = compute_logits(draw, network, batch)
        outputs = score_logits(model, batch, logits)
        (loss(outputs, batch)[0] / batch.mask.sum()).backward()
        return list_columns(outputs) | {"gradients": name_gradients(network, model)}


def compute_logits(draw: Draw, network, batch: TrainBatch) -> torch.Tensor:
    """Compute logits of text ``[N, vocab]``, or a critic's values ``[N, 1]``, by HuggingFace's ``network``."""
    if draw.at_once:
        return compute_padded_logits(network, batch)
    return torch.cat([scores for _, scores in iterate_logits(network, batch)])


def score_logits(model: ModelSpec, batch: TrainBatch, logits: torch.Tensor) -> TokenOutputs | ValueOutputs:
    """Score logits ``[N, vocab]``: the sampler's likeliest ids too, if the batch has them, and all others together."""
    if model.head == "value":
        return ValueOutputs(logits[:, 0])
    outputs = score_tokens(logits, batch.targets, model.banned_tokens)
    if batch.rollout_top_ids is None:
        return outputs
    ids, log_p = batch.rollout_top_ids.long(), logits.log_softmax(-1)
    top = log_p.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)  # [N, k]
    is_top = (ids[:, :, None] == torch.arange(logits.shape[-1])).any(1)
    others = log_p.masked_fill(is_top, -1e30).logsumexp(-1, keepdim=True)
    return dataclasses.replace(outputs, top_logprobs=torch.cat([top, others], -1))


def compute_both_ways(
    rank: int,
    world: int,
    address: str,
    model,
    settings: dict,
    platform: str = "cpu",
    make=make_grouped,
    share="prompts",
) -> list[dict]:
    """Outputs, gradients and slots without sharing and with it, of one engine and one batch.

    Args:
        make: ``make(model)``, the batch.
    """
    engine = build_engine(rank, world, address, model, settings, platform)
    from engines.probes.megatron import gather_gradients

    batch, found, build = make(engine.model), [], engine.layout
    loss = _choose_loss(engine.model, batch)
    for way in ("none", share):
        engine.config, slots = dataclasses.replace(engine.config, share=way), []
        engine.layout = lambda *args: (slots.append(build(*args)), slots[-1])[1]  # noqa: B023 (called before the next)
        schedule, shard = plan(engine, batch)
        outputs = engine.forward(shard, raw=make is make_stale)
        computed = sum(layout.valid.numel() for layout in slots[: len(shard.counts)])
        engine.backward(shard, loss, float(batch.mask.sum()))
        found.append(
            {
                "schedule": schedule,
                "dp_rank": engine.dp_rank,
                "outputs": list_columns(outputs) if engine.is_leader else None,
                "gradients": gather_gradients(engine),
                "slots": computed,
                "dummies": shard.num_dummies,
            }
        )
    del engine.layout
    return found
