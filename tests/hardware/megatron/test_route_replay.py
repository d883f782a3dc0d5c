"""Experts that are given with the tokens, against transformers with the same forced: outputs and gradients."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from support.cover import in_runs
from support.factors import parse_size
from support.huggingface import name_gradients, run_forward
from support.ranks.engines_cases import build_engine, compute_steps, make_batch, plan
from support.ranks.pool import draw_address
from support.ranks.shared_cases import make_grouped
from support.rounding import Draw, check_distances, measure_rounding

from engines.models.spec import ModelSpec
from hardware.megatron.form import NO_ROUTE
from rlworker.checks.reference.huggingface import load_huggingface, probe_loss

LAYERS, EXPERTS, CHOSEN = 4, 8, 3


def draw_routes(batch, seed: int = 3) -> torch.Tensor:
    """Draw experts ``[N, layers, k]`` by the ids before each token, so that shared prompts have the same; some tokens
    have none."""
    found, start = [], 0
    for size in batch.lengths:
        ids = batch.inputs[start : start + size].tolist()
        start += size
        for place in range(size):
            generator = torch.Generator().manual_seed(hash((seed, *ids[: place + 1])) % 2**31)
            routes = torch.rand(LAYERS, EXPERTS, generator=generator).argsort(-1)[:, :CHOSEN]
            found.append(routes if place % 5 != 3 else torch.full_like(routes, NO_ROUTE))
    return torch.stack(found).to(torch.int16)


def make_replayed(make):
    batch = make()
    return replace(batch, routes=draw_routes(batch))


MAKERS = {"lone": partial(make_replayed, make_batch), "grouped": partial(make_replayed, make_grouped)}


@pytest.fixture(scope="module")
def reference(make_hf_model):
    """``reference(family, kind)``: the rounding of ``compute_forced``."""
    return cache(lambda family, kind: measure_rounding(compute_forced, make_hf_model(family, False), kind))


def compute_forced(draw: Draw, folder: str, kind: str) -> dict:
    """Compute logprobs ``[N]`` and gradients by transformers, one sequence at a time, experts forced."""
    spec, batch = ModelSpec.from_folder(folder), MAKERS[kind]()
    parts = [part for part in batch.routes.split(list(batch.lengths)) if len(part)]
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        for name, gate in model.named_modules():
            if name.endswith(".mlp.gate"):
                given = iter([part[:, int(name.split(".")[2])].long() for part in parts])
                gate.register_forward_hook(partial(force_choices, given))
        found = run_forward(model, spec, batch, probe_loss)
        (found.loss / float(batch.mask.sum())).backward()
        return {"logprobs": found.outputs.logprobs, "gradients": name_gradients(model, spec)}


def force_choices(given, gate, inputs, found):
    """Replace a gate's weights and numbers of experts by those of the next sequence's, where there are some.

    Its logits are computed anew: transformers 5.5 returns their softmax in their place.
    """
    _, _, own = found
    logits = F.linear(inputs[0].flatten(0, -2), gate.weight)
    routes = next(given)
    numbers = torch.where(routes == NO_ROUTE, own, routes)
    weights = logits.softmax(dim=-1).gather(1, numbers)
    return logits, weights / weights.sum(dim=-1, keepdim=True) if gate.norm_topk_prob else weights, numbers


def compute_replayed(rank: int, world: int, address: str, folder: str, settings: dict, kind: str) -> dict:
    engine = build_engine(rank, world, address, folder, settings)
    from engines.probes.megatron import gather_gradients

    batch = MAKERS[kind]()
    schedule, shard = plan(engine, batch)
    outputs = engine.forward(shard, every=True)
    engine.backward(shard, probe_loss, float(batch.mask.sum()))
    found = {"schedule": schedule, "dp_rank": engine.dp_rank, "outputs": outputs, "leads": engine.is_leader}
    return found | {"gradients": gather_gradients(engine)}


@pytest.fixture
def compare(pool_of, make_hf_model, reference, measured):
    def run(size: str, kind: str = "lone", family: str = "qwen3_moe", **settings) -> None:
        settings, folder = settings | parse_size(size), make_hf_model(family, False)
        ranks = pool_of(size).run(compute_replayed, draw_address(), folder, settings, kind)
        leaders = sorted((rank for rank in ranks if rank["leads"]), key=lambda rank: rank["dp_rank"])
        got = leaders[0]["schedule"].restore([rank["outputs"] for rank in leaders]).logprobs
        want = reference(family, kind)
        distances = {
            "logprobs": want.compare("logprobs", got),
            "gradients": want.compare("gradients", leaders[0]["gradients"]),
        }
        check_distances(distances, measured, f"{size} {kind} {family} {settings}")
        assert max(float(gradient.abs().max()) for gradient in want.truth["gradients"].values()) > 1e-2

    return run


def test_outputs_and_gradients(compare):
    for settings in ({"layout": "thd", "pad_to_multiple_of": 16}, {"layout": "bshd", "micro_batch_tokens": 60}):
        compare("one", **settings)


def test_recomputation_and_shared_prompts(compare):
    compare("one", "grouped", share="prompts", recompute="full", micro_batch_tokens=60)


@pytest.mark.parametrize(
    "size", in_runs(large=["TP2-ETP2", "CP2-EP2", "PP2-TP2-EP2"], product=["TP2", "CP2", "PP2", "DP2-EP2", "TP2-EP2"])
)
def test_ranks(compare, size):
    compare(size, layout="bshd", recompute="full", micro_batch_tokens=60)
    compare(size, "grouped", share="prompts")


@pytest.mark.large
@pytest.mark.parametrize("size", ["one", "PP2"])
def test_a_layer_without_experts(compare, size):
    compare(size, family="qwen3_moe-dense")


def compute_own(rank: int, world: int, address: str, folder: str, routes: torch.Tensor) -> list[torch.Tensor]:
    """Logprobs by own routing, by the routes given, and by those of the token before."""
    engine, found = build_engine(rank, world, address, folder, {"layout": "thd"}), []
    for given in (None, routes, routes.roll(1, 0)):
        _, shard = plan(engine, replace(make_batch(), routes=given))
        found.append(engine.forward(shard, every=True).logprobs)
    return found


def test_its_own_choices_change_nothing_in_fp32(one_rank, make_hf_model, measured):
    """And those of a neighbour a lot."""
    folder, chosen = make_hf_model("qwen3_moe", False), {}
    spec = ModelSpec.from_folder(folder)
    model = load_huggingface(spec)
    for name, gate in model.named_modules():
        if name.endswith(".mlp.gate"):
            gate.register_forward_hook(lambda gate, _, out: chosen.setdefault(gate, []).append(out[2]))
    with torch.no_grad():
        run_forward(model, spec, make_batch(), probe_loss)
    routes = torch.stack([torch.cat(parts) for parts in chosen.values()], dim=1).to(torch.int16)
    own, given, shifted = one_rank.run(compute_own, draw_address(), folder, routes)[0]
    want, mask = measure_rounding(compute_steps, folder), make_batch().mask
    check_distances({"own": want.compare("logprobs", given * mask, base=own * mask)}, measured, "own choices")
    assert float((shifted - own).abs().mean()) > 0.01
