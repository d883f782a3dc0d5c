"""Layers with a state: the probe hears through them what it must and nothing else, and names each planted leak."""

import math
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
from support.cover import in_runs
from support.factors import LAYOUTS, STATE_EXPERT_FAMILIES, STATE_FAMILIES, parse_size
from support.ranks.engines_cases import build_engine, compute_steps, gather_logits, make_batch, plan
from support.ranks.pool import draw_address
from support.rounding import measure_rounding

from engines.probes.case import ProbeCase
from engines.probes.faults import FAULTS, mend, plant
from hardware.attention.rules import CHUNK, Rule
from rlworker.checks.case import make_probe_case

LENGTHS = (9, 1, 14, 0, 6, CHUNK + 2)
CASE: ProbeCase = make_probe_case(LENGTHS)
LEAKS = ("convolutions run on", "states run on", "convolutions and states run on", "boundaries of states off by one")
LEAST = 1e-1
"""Change of a logit that a leak makes at least, of logits up to about 5."""


def probe(rank, world, address, folder, settings, faults, platform="cpu", leak_limit=0.0):
    """For each fault: in each layout what the probe of layers found on this rank, in thd what that of the whole model
    did, and how far logits are from those without a fault; ``""`` plants none."""
    engine = build_engine(rank, world, address, folder, settings, platform)
    from engines.probes.megatron import probe_attention, probe_tokens

    _, shard = plan(engine, make_batch())
    right, found = gather_logits(engine, shard), {}
    for name in faults:
        if name:
            plant(engine, name)
        try:
            influences = {kind: probe_attention(engine, kind, Rule(state=True), CASE) for kind in LAYOUTS}
            influences["tokens"] = probe_tokens(engine, "thd", engine.model.rules, CASE, leak_limit)
            wrong = gather_logits(engine, shard)
        finally:
            mend(engine)
        found[name] = influences, 0.0 if right is None else float((wrong - right).abs().max())
    return found


IN_CI = [(STATE_FAMILIES[0], size, "cpu") for size in ("TP2", "CP2", "PP2")]
IN_CI += [("qwen3_next", "DP2-EP2", "cpu"), (STATE_FAMILIES[0], "one", "cuda-emulated")]
BY_HAND = [
    *product(STATE_FAMILIES, ("one", "TP2-CP2"), ("cpu",)),
    *product(STATE_EXPERT_FAMILIES, ("one", "TP2"), ("cpu",)),
    ("qwen3_5_moe_text", "DP2-EP2", "cpu"),
    (STATE_FAMILIES[0], "TP2-CP2", "cuda-emulated"),
]


@pytest.mark.parametrize(("family", "size", "platform"), in_runs(large=IN_CI, product=BY_HAND))
def test_nothing_is_heard_but_the_past_of_the_same_sequence(pool_of, make_hf_model, family, size, platform):
    folder = make_hf_model(family, False)
    has_experts = family in STATE_EXPERT_FAMILIES
    leak_limit = measure_rounding(compute_steps, folder).find_limit("logprobs") if has_experts else 0.0
    case = draw_address(), folder, parse_size(size), [""], platform, leak_limit
    for rank in pool_of(size).run(probe, *case):
        assert rank[""] == ({"bshd": [], "thd": [], "tokens": []}, 0.0)


@pytest.mark.parametrize(
    ("platform", "leaks"),
    in_runs(large=[("cpu", ["states run on"])], product=[("cpu", LEAKS), ("cuda-emulated", LEAKS)]),
)
def test_every_leak_is_named(one_rank, make_hf_model, measured, platform, leaks):
    assert all(FAULTS[name].found_by == "attention" for name in LEAKS)
    (rank,) = one_rank.run(probe, draw_address(), make_hf_model(STATE_FAMILIES[0], False), {}, leaks, platform)
    for name, (influences, moved) in rank.items():
        layers = influences["thd"]
        assert len(layers) == 3, f"{name}: in each layer with a state"
        assert all(layer.leaks.get("a neighbour in the pack", 0) > 0 for layer in layers), (name, layers)
        assert influences["tokens"][0].leaks["a neighbour in the pack"] > 0, name
        measured({name: moved})
        assert moved >= LEAST, name


def probe_calls(rank, world, address, folder):
    """What the probe finds in layers whose kernels get one sequence for each call, in place of the runs; and without
    that."""
    engine, found = build_engine(rank, world, address, folder, {}, "cuda-emulated"), []
    from engines.probes.megatron import probe_attention
    from hardware.cuda import delta_rule

    build = delta_rule.build_plan

    def join_bounds(*args):
        plan = build(*args)
        joined = [
            replace(call, bounds=call.bounds[[0, -1]], host_bounds=call.host_bounds[[0, -1]]) for call in plan.calls
        ]
        return replace(plan, calls=tuple(joined))

    for make in (build, join_bounds):
        with patch.object(delta_rule, "build_plan", make):
            found.append(probe_attention(engine, "thd", Rule(state=True), CASE))
    return found


@pytest.mark.large
def test_runs_that_kernels_are_not_told_of_are_named(one_rank, make_hf_model):
    (found,) = one_rank.run(probe_calls, draw_address(), make_hf_model(STATE_FAMILIES[0], False))
    right, wrong = found
    assert right == [] and len(wrong) == 3, "in each layer with a state"
    assert all(layer.leaks["a neighbour in the pack"] > 0 for layer in wrong)


def probe_forgetful(rank, world, address, folder):
    """What the probe finds in layers that forget fast, as some heads of trained models do, and what it says of layers
    that are not what their kind says."""
    engine = build_engine(rank, world, address, folder, {})
    from engines.probes.megatron import probe_attention

    for layer in engine.decoder.decoder.layers[:3]:
        layer.self_attention.a_log.data.fill_(math.log(16))
        layer.self_attention.dt_bias.data.fill_(6.0)
    found, told, (state, *_, full) = probe_attention(engine, "thd", Rule(state=True), CASE), [], engine.model.kinds
    for kinds in ((full,) * 4, (state,) * 4):
        engine.model = replace(engine.model, kinds=kinds)
        try:
            probe_attention(engine, "thd", Rule(state=True), CASE)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return found, told


def test_the_probe_hears_through_layers_that_forget_and_fails_without_such_layers(one_rank, make_hf_model):
    ((found, told),) = one_rank.run(probe_forgetful, draw_address(), make_hf_model(STATE_FAMILIES[0], False))
    assert found == []
    none, other = told
    assert "no layer of" in none and "has a state" in none
    assert "layer 4 has" in other and "expected a state, as its kind in qwen3_5_text says" in other
