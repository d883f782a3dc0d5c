"""The gated delta rule by chunks, over packs, rows and shared beginnings, against the loop over one sequence; and the
calls of FLA's kernels, which are emulated."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.attention import step_delta_rule
from torch import Tensor

from engines.megatron.layout import Layout
from hardware.attention import delta_rule as module
from hardware.attention.delta_rule import (
    TAIL,
    DeltaPlan,
    continue_delta_rule,
    convolve,
)
from hardware.attention.mask_spec import MaskSpec, Sharing
from hardware.cuda.delta_rule import build_plan
from hardware.cuda.emulator.delta_rule import chunk_gated_delta_rule
from rlworker.checks.device.attention import LENGTHS, SHARED, find_holding_tokens

GROUPS, RATIO, KEY, VALUE, TAPS = 2, 2, 8, 16, TAIL + 1
MIXED = GROUPS * (2 * KEY + RATIO * VALUE)
BUILDS = {"torch": DeltaPlan.build, "fla": partial(build_plan, kernel=chunk_gated_delta_rule)}
LIMIT, LEAK = 1e-5, 1e-1
"""Largest difference to the loop, relative to the largest number; a leak is at least so large."""


def draw_inputs(tokens: int) -> tuple[Tensor, Tensor]:
    """Draw rows ``[tokens, D]`` of query, key, value and both gates, and the convolution's weight ``[MIXED, TAPS]``."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, MIXED + 2 * GROUPS * RATIO, generator=generator)
    weight = torch.randn(MIXED, TAPS, generator=generator) / 2
    return rows.requires_grad_(), weight.requires_grad_()


def split_rows(mixed: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    query, key, value = mixed.split((GROUPS * KEY, GROUPS * KEY, GROUPS * RATIO * VALUE), dim=-1)
    decay, beta = (gate.unflatten(-1, (GROUPS, RATIO)) for gate in gates.chunk(2, dim=-1))
    heads = query.unflatten(-1, (GROUPS, KEY)), key.unflatten(-1, (GROUPS, KEY))
    return *heads, value.unflatten(-1, (GROUPS, RATIO, VALUE)), -0.1 * decay.sigmoid(), beta.sigmoid()


def step(rows: Tensor, weight: Tensor) -> Tensor:
    """Convolve and apply the rule to one sequence ``[tokens, D]``, as they are written."""
    mixed = rows[:, :MIXED]
    places = [range(max(0, i - TAPS + 1), i + 1) for i in range(len(rows))]
    convolved = [(mixed[list(p)] * weight.T[TAPS - len(p) :]).sum(0) for p in places]
    return step_delta_rule(*split_rows(torch.stack(convolved), rows[:, MIXED:]))


def apply(rows: Tensor, weight: Tensor, plan: DeltaPlan) -> Tensor:
    """Convolve and apply the rule to the slots of all ranks; this rank's slots ``[slots, G, R, dv]``."""
    chunks = plan.cut(rows)
    mixed = convolve(chunks[..., :MIXED], weight)
    return plan.join(plan.apply_rule(*split_rows(mixed, chunks[:, TAIL:, MIXED:])))


def run_steps(lengths, holders, rows, weight) -> Tensor:
    rows, weight = rows.double(), weight.double()
    return torch.cat([step(part, weight) for part in rows[holders].split(list(lengths)) if len(part)])


def run_chunks(layouts: list[Layout], holders, rows, weight, build=DeltaPlan.build) -> Tensor:
    """Compute every token's output ``[N, G, R, dv]`` from slots of several ranks; a slot of padding is no number."""
    # Of each rank [b, s] tokens, then in Megatron's order.
    places = [layout.pack(holders, fill=len(rows)).T.flatten() for layout in layouts]
    slots = torch.cat([rows, torch.full((1, rows.shape[1]), torch.nan)])[torch.cat(places)]
    outs = 0
    for layout in layouts:
        b, s = layout.shape
        out = apply(slots, weight, build(layout.build_mask_spec()))
        outs = outs + layout.unpack(out.unflatten(0, (s, b)).transpose(0, 1))
    return outs


def compare(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """The largest difference of outputs and of the gradients of both inputs, relative to the largest number of each."""
    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for out in (got, want):
        gradients = torch.autograd.grad((out * probe.to(out.dtype)).sum(), inputs, retain_graph=True)
        found.append((out.detach(), *gradients))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))


def check(lengths, build="torch", *, kind="thd", tp=1, cp=1, slots=0, sharing=None) -> None:
    settings = dict(tp=tp, cp=cp, slots=slots, sharing=sharing)
    layouts = [Layout.build(lengths, kind, cp_rank=rank, **settings) for rank in range(cp)]
    holders = torch.arange(sum(lengths)) if sharing is None else find_holding_tokens(lengths, sharing)
    inputs = draw_inputs(sum(lengths))
    want = run_steps(lengths, holders, *inputs)
    assert compare(run_chunks(layouts, holders, *inputs, BUILDS[build]), want, inputs) <= LIMIT


@pytest.mark.parametrize("build", ["torch", pytest.param("fla", marks=pytest.mark.large)])
@pytest.mark.parametrize("lengths", [(2048,), (128,) * 16, (5, 400, 63, 64, 65, 1, 128, 129, 390, 803)], ids=len)
def test_the_rule_at_2048_tokens(lengths, build):
    assert sum(lengths) == 2048
    check(lengths, build)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", ["bshd", "thd"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_layouts(lengths, kind, cp, build):
    check(lengths, build, kind=kind, cp=cp, tp=2)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("pack", SHARED, ids=["groups", "a tree"])
@pytest.mark.parametrize(("build", "chunk"), [("torch", 4), ("torch", 64), ("fla", 64)])
def test_shared_beginnings(monkeypatch, pack, cp, build, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    check(pack[0], build, cp=cp, sharing=pack[1], slots=96)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.large) for seed in range(1, 6))])
def test_random_layouts(monkeypatch, seed, build):
    draw = random.Random(seed)
    for _ in range(12):
        lengths, sharing = draw_pack(draw)
        monkeypatch.setattr(module, "CHUNK", draw.choice([1, 2, 8, 64]))
        kind = "thd" if sharing else draw.choice(["bshd", "thd"])
        check(lengths, build, kind=kind, tp=draw.choice([1, 2]), cp=draw.choice([1, 2]), sharing=sharing)


def draw_pack(draw: random.Random) -> tuple[tuple[int, ...], Sharing | None]:
    """Draw sequences of which some begin like an earlier one, whose own beginning may be another's; or none does."""
    lengths, owners, counts = [draw.randint(1, 30)], [0], [0]
    for number in range(1, draw.randint(2, 7)):
        owner = draw.randrange(number)
        if lengths[owner] > counts[owner] and draw.random() < 0.6:
            owners.append(owner)
            counts.append(draw.randint(counts[owner] + 1, lengths[owner]))
        else:
            owners.append(number)
            counts.append(0)
        lengths.append(counts[-1] + draw.choice([0, 1, 2, draw.randint(3, 40)]))
    return tuple(lengths), Sharing(tuple(owners), tuple(counts)) if any(counts) else None


@pytest.mark.parametrize("pieces", [(300, 1, 1), (64, 64, 5), (1, 130, 40)], ids=str)
def test_going_on_from_the_states_of_a_part_before(pieces):
    """Three sequences, whose parts are computed together, the second of each as long as its neighbours' first."""
    rows, _ = draw_inputs(3 * sum(pieces))
    sequences = rows.split(sum(pieces))
    want = [step_delta_rule(*split_rows(part[:, :MIXED].double(), part[:, MIXED:].double())) for part in sequences]
    states, at, found = torch.zeros(3, GROUPS, RATIO, KEY, VALUE), [0, 0, 0], [[], [], []]
    for turn in range(len(pieces)):
        lengths = tuple(pieces[(turn + number) % len(pieces)] for number in range(3))
        parts = [one[start : start + n] for one, start, n in zip(sequences, at, lengths)]
        plan = DeltaPlan.build(MaskSpec("thd", lengths, lengths))
        order = plan.slots[: plan.counts[0], TAIL].argsort()
        chunks = plan.cut(torch.cat(parts))[:, TAIL:]
        out, states = continue_delta_rule(
            *split_rows(chunks[..., :MIXED], chunks[..., MIXED:]), plan, states[order.argsort()]
        )
        states = states[order]
        for number, part in enumerate(plan.join(out).split(lengths)):
            found[number].append(part)
            at[number] += lengths[number]
    for got, expected in zip(found, want, strict=True):
        assert float((torch.cat(got) - expected).abs().max() / expected.abs().max()) <= LIMIT


def test_the_documented_example(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    layout = Layout.build((3, 3, 1), "thd", sharing=Sharing((0, 0, 2), (0, 2, 0)))
    plan = DeltaPlan.build(layout.build_mask_spec())
    assert plan.counts == (2, 2) and plan.sources[0] is None and plan.sources[1].tolist() == [0, 0]
    assert plan.slots.tolist() == [[5, 5, 5, 0, 1], [5, 5, 5, 4, 5], [5, 0, 1, 2, 5], [5, 0, 1, 3, 5]]
    assert plan.filled.tolist() == [[True, True], [True, False], [True, False], [True, False]]


def test_the_documented_example_of_calls():
    """With a tail of three tokens, of which the first is left out."""
    layout = Layout.build((3, 3, 1), "thd", sharing=Sharing((0, 0, 2), (0, 2, 0)))
    plan = BUILDS["fla"](layout.build_mask_spec())
    first, second = plan.calls
    assert plan.slots.tolist() == [[5, 5, 5, 0, 1, 5, 5, 5, 4, 5, 0, 1, 2, 5, 0, 1, 3]]
    assert [place for place, filled in enumerate(plan.filled[0].tolist()) if filled] == [0, 1, 5, 9, 13]
    assert (first.slots, first.bounds.tolist(), first.sources) == (9, [0, 5, 9], None)
    assert (second.slots, second.bounds.tolist(), second.sources.tolist()) == (5, [0, 4, 5], [0, 0])
    assert plan.places.tolist() == [0, 1, 9, 13, 5]


@pytest.mark.parametrize("build", BUILDS)
def test_without_a_token_there_is_no_plan(build):
    with pytest.raises(ValueError, match="needs at least one token"):
        BUILDS[build](MaskSpec("thd", (0, 0), (4, 4)))


# -- leaks, each planted by itself


def run_convolution_on(spec: MaskSpec, make):
    """Read the slots before a sequence's first, whoever has them."""
    plan = make(spec)
    slots = plan.slots.clone()
    for _ in range(TAIL):
        begins = (slots[:, :-1] == sum(spec.padded)) & (slots[:, 1:] < sum(spec.padded))
        slots[:, :-1] = torch.where(begins, (slots[:, 1:] - 1).clamp(min=0), slots[:, :-1])
    return replace(plan, slots=slots)


def make_of(runs, spec: MaskSpec, make):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cut_runs", lambda spec: runs)
        return make(spec)


def carry_states_on(spec: MaskSpec, make):
    """Begin each sequence with the state after the one before."""
    return make_of([(*run[:3], number - 1) for number, run in enumerate(module.cut_runs(spec))], spec, make)


def move_boundary(spec: MaskSpec, make):
    first, second, *others = spec.lengths
    moved = (first + 1, second - 1, *others)
    return make(MaskSpec("thd", moved, moved))


def forget_prompts(spec: MaskSpec, make):
    """Begin the own tokens of a sequence with no state, though its first tokens are another's."""
    return make_of([(*run[:3], -1) for run in module.cut_runs(spec)], spec, make)


def join_bounds(spec: MaskSpec, make):
    """Tell the kernels of one sequence."""
    plan = make(spec)
    one = [replace(call, bounds=call.bounds[[0, -1]], host_bounds=call.host_bounds[[0, -1]]) for call in plan.calls]
    return replace(plan, calls=tuple(one))


def hand_on_to_the_next(spec: MaskSpec, make):
    """Begin the own tokens of a sequence with the state after another's prompt."""
    plan = make(spec)
    first, second = plan.calls
    return replace(plan, calls=(first, replace(second, sources=second.sources.roll(1))))


PROMPTS = Sharing((0, 0, 0), (0, 30, 30))
LEAKS = {
    "convolution": (run_convolution_on, None),
    "state": (carry_states_on, None),
    "off by one": (move_boundary, None),
    "a prompt's state": (forget_prompts, PROMPTS),
}


@pytest.mark.parametrize(
    ("leak", "sharing", "build"),
    [
        *((*leak, build) for build in BUILDS for leak in LEAKS.values()),
        (join_bounds, None, "fla"),
        (hand_on_to_the_next, Sharing((0, 1, 0, 1), (0, 0, 30, 30)), "fla"),
    ],
)
def test_a_leak_is_large(leak, sharing, build):
    lengths = (70, 40, 33, 36)[: len(sharing.owners) if sharing else 3]
    layouts = [Layout.build(lengths, "thd", sharing=sharing)]
    holders = torch.arange(sum(lengths)) if sharing is None else find_holding_tokens(lengths, sharing)
    inputs = draw_inputs(sum(lengths))
    want = run_steps(lengths, holders, *inputs)
    make = BUILDS[build]
    wrong, right = (run_chunks(layouts, holders, *inputs, made) for made in (partial(leak, make=make), make))
    assert float((wrong - want).abs().max() / want.abs().max()) >= LEAK
    assert compare(wrong, want, inputs) >= LEAK and compare(right, want, inputs) <= LIMIT
