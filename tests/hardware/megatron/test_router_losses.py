"""Losses of a router against loops and transformers: values, and gradients of a whole model over sizes and layouts."""

import math
from functools import cache
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from support.cover import in_runs
from support.factors import parse_size
from support.huggingface import name_gradients, run_forward
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address
from support.ranks.shared_cases import make_grouped, make_uneven

from engines.models.spec import ModelSpec
from hardware.megatron.router_losses import AddedLoss, sum_balance_loss, sum_z_loss
from rlworker.checks.reference.huggingface import load_huggingface

BALANCE, Z = 0.7, 0.2
EXPERTS, CHOSEN = 8, 3


def count_choices(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(CHOSEN, dim=-1).indices.flatten().bincount(minlength=EXPERTS)


def test_values_are_those_of_a_loop_and_of_transformers():
    """Also as parts of two ranks, which know the counts of both."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(11, EXPERTS, generator=torch.Generator().manual_seed(0))
    scores, counts = logits.softmax(dim=-1), count_choices(logits)
    by_loop = 0.0
    for expert in range(EXPERTS):
        chose = sum(expert in row.argsort(descending=True)[:CHOSEN].tolist() for row in logits)
        by_loop += EXPERTS * chose / 11 * sum(float(row[expert]) for row in scores) / 11
    found = float(sum_balance_loss(scores, counts, CHOSEN)) / 11
    assert found == pytest.approx(by_loop, rel=1e-6)
    assert found == pytest.approx(float(load_balancing_loss_func((logits,), EXPERTS, CHOSEN)), rel=1e-6)
    parts = [float(sum_balance_loss(part, counts, CHOSEN)) for part in scores.split([4, 7])]
    assert sum(parts) == pytest.approx(11 * found, rel=1e-6)
    z = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist())
    assert float(sum_z_loss(logits)) == pytest.approx(z, rel=1e-6)


def test_balanced_experts_have_the_least_loss():
    """k where all are alike, E where all tokens have one expert of k = 1."""
    even = torch.full((EXPERTS, EXPERTS), 1 / EXPERTS)
    assert float(sum_balance_loss(even, torch.full((EXPERTS,), CHOSEN), CHOSEN)) == pytest.approx(CHOSEN * EXPERTS)
    one = torch.eye(EXPERTS)[:1].expand(5, -1)
    assert float(sum_balance_loss(one, torch.tensor([5] + [0] * 7), 1)) == pytest.approx(EXPERTS * 5)


def test_without_a_token_losses_and_gradients_are_0():
    logits = torch.zeros(0, EXPERTS, requires_grad=True)
    loss = sum_balance_loss(logits.softmax(dim=-1), torch.zeros(EXPERTS, dtype=torch.long), CHOSEN) + sum_z_loss(logits)
    out = AddedLoss.apply(2 * logits, loss)
    out.sum().backward()
    assert float(loss) == 0 and logits.grad.shape == (0, EXPERTS)


def test_an_added_loss_gets_a_gradient_of_1():
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
    out = AddedLoss.apply(x, y.square())
    assert torch.equal(out, x)
    (5 * out).sum().backward()
    assert x.grad.tolist() == [5, 5] and float(y.grad) == 6


Part = tuple[tuple[int, int], ...]
"""What routers see at once: numbers of sequences, and how many of the first tokens of each they have seen already."""


def list_parts(schedule, batch, shares_prompts: bool) -> tuple[Part, ...]:
    """List what routers see at once: the micro-batches of all replicas at a time, in order.

    A prompt is seen once in a micro-batch of a replica. It ends with the input that predicts the first counting target.
    """
    starts, parts = [0, *accumulate(batch.lengths)], []
    for micro_batches in zip(*schedule.rows, strict=True):
        part = []
        for rows in micro_batches:
            seen = set()
            for row in rows.tolist():
                own = slice(starts[row], starts[row + 1])
                counted = batch.mask[own].tolist()
                prompt = tuple(batch.inputs[own].tolist())[: counted.index(True) + 1 if any(counted) else 0]
                part.append((row, len(prompt) if shares_prompts and prompt in seen else 0))
                seen.add(prompt)
        parts.append(tuple(part))
    return tuple(parts)


@pytest.fixture(scope="module")
def reference(make_hf_model):
    """``reference(make, parts, balance, z)``: gradients by transformers of the router's losses alone, and the means of
    both over layers, one sequence at a time."""
    return cache(lambda *case: differentiate(make_hf_model("qwen3_moe", False), *case))


def differentiate(folder: str, make, parts: tuple[Part, ...], balance: float, z: float) -> tuple[dict, list[float]]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    spec, batch = ModelSpec.from_folder(folder), make()
    model, found = load_huggingface(spec), {}
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            # Computed anew: transformers 5.5 returns the softmax of the logits in their place.
            module.register_forward_hook(
                lambda gate, given, _: found.setdefault(gate, []).append(F.linear(given[0].flatten(0, -2), gate.weight))
            )
    run_forward(model, spec, batch, make_no_loss)
    numbers = {row: place for place, row in enumerate(row for row, size in enumerate(batch.lengths) if size)}
    means = torch.zeros(2)
    for logits in found.values():  # of a layer, one tensor for each sequence with a token
        seen = [torch.cat([logits[numbers[row]][first:] for row, first in part]) for part in parts]
        of_parts = [len(x) * load_balancing_loss_func((x,), EXPERTS, CHOSEN) for x in seen]
        squares = [x.logsumexp(dim=-1).square().sum() for x in seen]
        means = means + torch.stack([sum(of_parts), sum(squares)]) / sum(map(len, seen))
    (means @ torch.tensor([balance, z])).backward()
    gradients = {name: gradient.clone() for name, gradient in name_gradients(model, spec).items()}
    return gradients, (means / len(found)).tolist()


def make_no_loss(outputs, batch):
    return 0 * outputs.logprobs.sum(), {}


def compute_gradients(rank: int, world: int, address: str, folder: str, settings: dict, make) -> dict:
    engine = build_engine(rank, world, address, folder, settings)
    from engines.probes.megatron import gather_gradients

    schedule, shard = plan(engine, make())
    engine.backward(shard, make_no_loss, 7.0)  # it divides the loss alone
    return {
        "gradients": gather_gradients(engine),
        "routing": engine.extensions["experts"].routers.measure(),
        "schedule": schedule,
        "dummies": shard.num_dummies,
        "is_leader": engine.is_leader and engine.dp_rank == 0,
    }


@pytest.fixture
def compare(pool_of, make_hf_model, reference, measured):
    """``compare(size, balance, z, make=..., **settings)``: the ranks' results, equal to the reference's."""

    def run(size: str, balance: float, z: float, make=make_batch, **settings) -> list[dict]:
        settings = {"micro_batch_tokens": 10**6} | settings | parse_size(size)
        settings["megatron"] = {"moe_aux_loss_coeff": balance, "moe_z_loss_coeff": z}
        folder = make_hf_model("qwen3_moe", False)
        ranks = pool_of(size).run(compute_gradients, draw_address(), folder, settings, make)
        (leader,) = (rank for rank in ranks if rank["is_leader"])
        parts = list_parts(leader["schedule"], make(), settings.get("share") == "prompts")
        got, (want, values) = leader["gradients"], reference(make, parts, balance, z)
        apart = {name: float((got[name] - gradient).norm() / gradient.norm()) for name, gradient in want.items()}
        routers = [difference for name, difference in apart.items() if name.endswith("mlp.gate.weight")]
        differences = {"router": max(routers), "others": max(apart.values())}
        measured(differences)
        assert len(routers) == 4 and max(apart.values()) < 1e-5, differences
        assert not any(got[name].any() for name in got.keys() - want.keys())
        losses = zip(("router_aux_loss", "router_z_loss"), values, (balance, z), strict=True)
        losses = {name: pytest.approx(value, rel=1e-5) for name, value, coefficient in losses if coefficient}
        for rank in ranks:
            assert {name: value for name, value in rank["routing"].items() if name.endswith("loss")} == losses
        return ranks

    return run


def count_micro_batches(ranks: list[dict]) -> int:
    return len(ranks[0]["schedule"].rows[0])


def test_gradients_over_padding_and_layouts(compare):
    for settings in ({"layout": "thd", "pad_to_multiple_of": 16}, {"layout": "bshd", "recompute": "full"}):
        assert count_micro_batches(compare("one", BALANCE, Z, **settings)) == 1


def test_gradients_over_micro_batches(compare):
    """Of the auxiliary loss those of each micro-batch by its tokens, of the z-loss those of all tokens alike."""
    assert count_micro_batches(compare("one", BALANCE, Z, micro_batch_tokens=24)) > 2
    compare("one", 0.0, Z, micro_batch_tokens=24)


def test_a_shared_prompt_counts_once(compare):
    """In the auxiliary loss, in the z-loss and in the tokens of the mean."""
    for size in (10**6, 60):
        ranks = compare("one", BALANCE, Z, make_grouped, share="prompts", micro_batch_tokens=size, recompute="full")
        schedule = ranks[0]["schedule"]
        assert schedule.count_computed() < 0.9 * sum(schedule.lengths)


@pytest.mark.parametrize("size", in_runs(large=["TP2-EP2", "CP2-EP2"], product=["TP2", "CP2", "TP2-ETP2"]))
def test_gradients_over_ranks_of_a_replica(compare, size):
    for settings in ({"layout": "thd", "pad_to_multiple_of": 16}, {"layout": "bshd", "recompute": "full"}):
        assert count_micro_batches(compare(size, BALANCE, Z, **settings)) == 1
    compare(size, BALANCE, Z, make_grouped, share="prompts")


@pytest.mark.large
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_over_stages(compare, recompute):
    """Which have at least as many micro-batches."""
    assert count_micro_batches(compare("PP2", BALANCE, Z, recompute=recompute)) == 2
    assert count_micro_batches(compare("PP2", BALANCE, Z, micro_batch_tokens=24, recompute=recompute)) > 2


@pytest.mark.large
@pytest.mark.parametrize("size", ["DP2", "DP2-EP2"])
def test_gradients_over_replicas(compare, size):
    """Whose tokens the auxiliary loss counts together: two replicas with a micro-batch each are one with all."""
    ranks = compare(size, BALANCE, Z)
    assert len(list_parts(ranks[0]["schedule"], make_batch(), False)) == 1
    compare(size, BALANCE, Z, micro_batch_tokens=24)
    compare(size, BALANCE, Z, make_grouped, share="prompts")
    ranks = compare(size, BALANCE, Z, make_uneven, share="prompts", micro_batch_tokens=40)
    assert sorted(rank["dummies"] for rank in ranks) == [0, 1], "a dummy adds nothing"


@pytest.mark.parametrize("size", in_runs(large=["TP2-DP2-EP4"], product=["PP2-DP2-EP2", "CP2-TP2-EP2"]))
def test_gradients_over_four_ranks(compare, size):
    compare(size, BALANCE, Z, micro_batch_tokens=40)
