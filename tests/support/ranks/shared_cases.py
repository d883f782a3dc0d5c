"""Batches of groups, whose samples begin alike, and what ranks compute of them with each prompt once and G times."""

import dataclasses

from support.ranks.engines_cases import build_engine, plan

GROUPS = ((9, 4), (5, 3), (14, 1), (3, 2), (7, 3))
"""Ids of each prompt, and how many samples it has; one group is a single sample."""
SAMPLED = (1, 2, 6, 11, 3, 8, 17)
"""Ids of each sample by turns; one of a single id has no input of its own."""


def make_grouped(seed: int = 1):
    """Make groups of samples, shuffled, some of two turns, among sequences that nobody begins like."""
    import torch

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


def make_forked(seed: int = 1):
    """Make groups whose prompts begin alike too, and samples that go on from a part of another's completion."""
    import torch

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


def make_grouped_images(model, paths, seed: int = 1):
    """Make groups of samples that go on from prompts with images and without; equal texts about other images too."""
    import torch
    from support.ranks.vlm_cases import make_prompts

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
    import torch

    from engines.batch.batch import TrainBatch
    from engines.images.columns import make_image_columns

    order = torch.randperm(len(sequences), generator=generator).tolist()
    sequences, sampled, images = ([x[i] for i in order] if x else () for x in (sequences, sampled, images))
    columns = make_image_columns(sequences, images, model.vision) if images else {}
    batch = TrainBatch.from_ids(sequences, sampled=sampled, **columns)
    return dataclasses.replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))


def value_loss(outputs, batch):
    """Sum values, weighed by advantages, over the tokens that count: the gradient differs at each."""
    loss = (batch.advantages * outputs.values * batch.mask).sum()
    return loss, {"loss": loss.detach()}


def compute_both_ways(
    rank: int, world: int, address: str, model, settings: dict, platform: str = "cpu", paths=None, share="prompts"
) -> list[dict]:
    """Outputs, gradients and slots without sharing and with it, of one engine and one batch."""
    engine = build_engine(rank, world, address, model, settings, platform)
    from engines.batch.shard import list_columns
    from engines.probes.megatron import gather_gradients
    from rlworker.checks.huggingface import probe_loss

    make = make_grouped if share == "prompts" else make_forked
    batch = make() if paths is None else make_grouped_images(engine.model, paths)
    loss, found, build = value_loss if engine.model.head == "value" else probe_loss, [], engine.layout
    for way in ("none", share):
        engine.config, slots = dataclasses.replace(engine.config, share=way), []
        engine.layout = lambda *args: (slots.append(build(*args)), slots[-1])[1]  # noqa: B023 (called before the next)
        schedule, shard = plan(engine, batch)
        outputs = engine.forward(shard)
        computed = sum(layout.valid.numel() for layout in slots[: len(shard.counts)])
        engine.backward(shard, loss, float(batch.mask.sum()))
        found.append(
            {
                "schedule": schedule,
                "dp_rank": engine.dp_rank,
                "outputs": list_columns(outputs) if engine.is_leader else None,
                "gradients": gather_gradients(engine),
                "slots": computed,
            }
        )
    del engine.layout
    return found
