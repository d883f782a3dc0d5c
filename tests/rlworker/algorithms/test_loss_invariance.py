"""Every loss through real engines: its gradient is the same however the batch is cut, spread and laid out."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from support.cover import matrix
from support.factors import LAYOUTS, count_ranks, parse_size
from support.huggingface import name_gradients
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address
from support.ranks.shared_cases import compute_logits, score_logits
from support.rounding import Draw, Rounding, check_distances, measure_rounding

from engines.batch.batch import TrainBatch
from engines.batch.shard import list_columns
from engines.models.spec import ModelSpec
from rlworker.algorithms import losses
from rlworker.algorithms.losses import constant_length, policy_loss, sequence_mean, sft_loss, token_mean, value_loss
from rlworker.checks.reference.huggingface import load_huggingface

_ENTROPY, constant_length_of_32 = partial(policy_loss, entropy_coef=0.05), partial(constant_length, tokens=32)
ppo, truncated = losses.ppo, losses.truncated_importance
POLICY = {
    "ppo, k2": (partial(_ENTROPY, surrogate=partial(ppo, dual_clip=3.0), kl_coef=0.1, kl=losses.kl_k2), token_mean),
    "gspo": (partial(_ENTROPY, surrogate=partial(losses.gspo, clip_low=0.1, clip_high=0.1)), sequence_mean),
    "cispo, truncated": (partial(_ENTROPY, surrogate=losses.cispo, correction=truncated), constant_length_of_32),
    "gmpo": (partial(_ENTROPY, surrogate=losses.gmpo), sequence_mean),
    "sapo, masked, k3": (
        partial(_ENTROPY, surrogate=losses.sapo, correction=losses.masked_importance, kl_coef=0.1),
        token_mean,
    ),
    "ppo, centered": (partial(_ENTROPY, surrogate=ppo, correction=truncated, center=True), token_mean),
    "sft": (sft_loss, sequence_mean),
}
CRITIC = {"clipped value": (partial(value_loss, clip=0.2), token_mean)}
WHOLE = {"layout": "bshd", "micro_batch_tokens": 10**6}
HEADS = {"language": POLICY, "value": CRITIC}
CUTS = {
    "one-split": ("one", {"micro_batch_tokens": 24}),
    "DP2": ("DP2", {}),
    "DP2-split": ("DP2", {"micro_batch_tokens": 24}),
    "TP2": ("TP2", {}),
    "PP2-split": ("PP2", {"micro_batch_tokens": 24}),
    "CP2": ("CP2", {}),
    "TP2-CP2-split": ("TP2-CP2", {"micro_batch_tokens": 32}),
    "DP2-PP2-dummy": ("DP2-PP2", {"micro_batch_tokens": 1}),
    "DP2-CP2-dummy": ("DP2-CP2", {"micro_batch_tokens": 1}),
}
"""Parallel size and settings. In the last two each of the seven sequences is a micro-batch, so that a replica has a
dummy."""


def full_batch(logprobs: torch.Tensor | None = None) -> TrainBatch:
    """The usual awkward sequences with every column that a loss reads; ratios of about 0.4 to 2.7 to ``logprobs``."""
    batch = make_batch().select(0, 8)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(5, batch.num_tokens, generator=generator)
    start = torch.zeros(batch.num_tokens) if logprobs is None else logprobs
    columns = dict(old_logprobs=start + 0.4 * noise[0], ref_logprobs=start + 0.4 * noise[1])
    columns |= dict(rollout_logprobs=start + 0.4 * noise[2], values=0.3 * noise[3], returns=noise[4])
    columns |= draw_top(batch, generator)
    columns["advantages"] = batch.repeat_per_token(
        torch.randn(len(batch), generator=generator)
    )  # gmpo takes one a sequence
    return replace(batch, **columns)


def draw_top(batch: TrainBatch, generator: torch.Generator, top: int = 5) -> dict[str, torch.Tensor]:
    """What a sampler found likeliest of 99 ids, one fewer in every other place, and what an old policy made of it."""
    tokens = batch.num_tokens
    ids = torch.rand(tokens, 99, generator=generator).argsort(-1)[:, :top].int()
    q, old = (torch.randn(tokens, top + 1, generator=generator).log_softmax(-1) for _ in range(2))
    none = ~batch.mask[:, None].repeat(1, top)
    none[::2, -1] = True
    return {
        "rollout_top_ids": ids.masked_fill(none, -1),
        "rollout_top_logprobs": q[:, :-1].masked_fill(none, -torch.inf),
        "old_top_logprobs": old,
    }


def weigh(batch: TrainBatch, name: str, aggregation) -> tuple[TrainBatch, float]:
    """Give a batch the weights of an aggregation, and return it with the denominator."""
    weights, denominator = aggregation(batch)
    top_ids = batch.rollout_top_ids if "centered" in name else None  # the others do not ask for them
    return replace(batch, weights=weights, rollout_top_ids=top_ids), denominator


def compute_alone(draw: Draw, folder: str, head: str, logprobs: torch.Tensor | None) -> dict:
    """Gradients of each loss by HuggingFace, one sequence at a time."""
    model, batch = ModelSpec.from_folder(folder, head=head), full_batch(logprobs)
    gradients = {}
    with draw.computing():
        network = draw.load(partial(load_huggingface, model))
        logits = compute_logits(draw, network, batch)
        for name, (loss, aggregation) in HEADS[head].items():
            part, denominator = weigh(batch, name, aggregation)
            part = draw.cast(part)
            network.zero_grad()
            (loss(score_logits(model, part, logits), part)[0] / denominator).backward(retain_graph=True)
            gradients[name] = {weight: gradient.clone() for weight, gradient in name_gradients(network, model).items()}
    return gradients


def compute_gradients(
    rank: int, world: int, address: str, folder: str, settings: dict, head: str, cases: dict, logprobs=None
) -> dict:
    """Gradients and metric sums of each loss, and the logprobs that ratios are made against."""
    engine = build_engine(rank, world, address, ModelSpec.from_folder(folder, head=head), settings)
    from engines.probes.megatron import gather_gradients

    if head == "language" and logprobs is None:
        schedule, shard = plan(engine, full_batch())
        logprobs = schedule.restore([engine.forward(shard)]).logprobs
    batch, found = full_batch(logprobs), {}
    for name, (loss, aggregation) in cases.items():
        part, denominator = weigh(batch, name, aggregation)
        _, shard = plan(engine, part)
        metrics, parts = engine.backward(shard, loss, denominator)
        assert not any("top_logprobs" in list_columns(part) for part in parts), "only a loss reads it"
        gradients = gather_gradients(engine)
        sums = {key: sum(float(part[key]) for part in metrics) for key in (metrics[0] if metrics else ())}
        found[name] = (gradients, {key: value for key, value in sums.items() if not key.endswith("_max")})
    return {"leader": engine.is_leader, "found": found, "logprobs": logprobs}


@pytest.fixture(scope="module")
def whole(one_rank, folders):
    made = {}

    def run(head: str, cases: dict) -> dict:
        if head not in made:
            (made[head],) = one_rank.run(compute_gradients, draw_address(), folders[head], WHOLE, head, cases)
        return made[head]

    return run


@pytest.fixture(scope="module")
def rounding(whole, folders):
    """``rounding(head)``: of ``compute_alone``, with the logprobs that the whole batch has."""

    def measure(head: str) -> Rounding:
        return measure_rounding(compute_alone, folders[head], head, whole(head, HEADS[head])["logprobs"])

    return cache(measure)


@pytest.fixture(scope="module")
def folders(make_hf_model, make_critic) -> dict[str, str]:
    return {"language": make_hf_model("qwen2", False), "value": make_critic("qwen2")}


LIGHT = ("DP2-CP2-dummy", "thd")
"""The cut over four ranks, and its layout, that every run of the suite takes."""
FEW_CUTS = ("DP2-split", "PP2-split", "TP2-CP2-split")
"""Cuts of a critic's step: what is added up, and over whom, is the policy's."""


@matrix(
    {"cut": tuple(CUTS), "head": tuple(HEADS), "layout": LAYOUTS},
    allowed=lambda case: case["head"] == "language" or case["cut"] in FEW_CUTS,
    heavy=lambda case: count_ranks(CUTS[case["cut"]][0]) == 4 and (case["cut"], case["layout"]) != LIGHT,
)
def test_gradients_do_not_depend_on_the_cut(pool_of, whole, folders, rounding, measured, cut, head, layout):
    (size, settings), cases = CUTS[cut], HEADS[head]
    want = whole(head, cases)
    args = (folders[head], parse_size(size) | settings | {"layout": layout}, head, cases, want["logprobs"])
    ranks = pool_of(size).run(compute_gradients, draw_address(), *args)
    leaders = [rank["found"] for rank in ranks if rank["leader"]]
    distances = {}
    for name, (gradients, sums) in want["found"].items():
        distances[name] = rounding(head).compare(name, leaders[0][name][0], base=gradients)
        for key, value in sums.items():
            assert sum(leader[name][1][key] for leader in leaders) == pytest.approx(value, rel=1e-5, abs=1e-5), key
    check_distances(distances, measured, f"{cut} {head} {layout}")


def test_the_cases_reach_what_they_are_for(whole):
    """Some ratios are clipped and some are not, some corrections are zero, and every loss has a gradient of its own."""
    found = whole("language", POLICY)["found"]
    counting = float(full_batch().mask.sum())
    assert sum(map(bool, full_batch().lengths)) == 7
    for name in ("ppo, k2", "gspo", "gmpo"):
        assert 0 < found[name][1]["clip_fraction"] < counting, name
    norms = {name: float(gradients["model.norm.weight"].norm()) for name, (gradients, _) in found.items()}
    assert min(norms.values()) > 0 and len(set(norms.values())) == len(norms)
    batch = full_batch()
    kept = losses.masked_importance(batch.old_logprobs, batch.rollout_logprobs)[batch.mask] > 0
    assert kept.any() and not kept.all()
