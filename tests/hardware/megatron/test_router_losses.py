"""Losses of a router against loops and transformers: values, and gradients of a whole model over sizes and layouts."""

import math

import pytest
import torch
from support.factors import parse_size
from support.huggingface import name_gradients, run_forward
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from engines.models.spec import ModelSpec
from hardware.megatron.router_losses import AddedLoss, sum_balance_loss, sum_z_loss
from rlworker.checks.huggingface import load_huggingface

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


@pytest.fixture(scope="module")
def reference(make_hf_model):
    """``reference(balance, z)``: gradients by transformers of the router's losses alone, one sequence at a time."""
    made = {}

    def compute(balance: float, z: float) -> dict:
        if (balance, z) not in made:
            made[balance, z] = differentiate(make_hf_model("qwen3_moe", False), balance, z)
        return made[balance, z]

    return compute


def differentiate(folder: str, balance: float, z: float) -> dict:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    spec = ModelSpec.from_folder(folder)
    model, found = load_huggingface(spec), {}
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(lambda gate, _, out: found.setdefault(gate, []).append(out[0]))
    run_forward(model, spec, make_batch(), make_no_loss)
    loss = torch.zeros(())
    for logits in map(torch.cat, found.values()):
        loss = loss + balance * load_balancing_loss_func((logits,), EXPERTS, CHOSEN)
        loss = loss + z * logits.logsumexp(dim=-1).square().mean()
    loss.backward()
    return {name: gradient.clone() for name, gradient in name_gradients(model, spec).items()}


def make_no_loss(outputs, batch):
    return 0 * outputs.logprobs.sum(), {}


def compute_gradients(rank: int, world: int, address: str, folder: str, settings: dict) -> dict:
    engine = build_engine(rank, world, address, folder, settings)
    from engines.probes.megatron import gather_gradients

    engine.backward(plan(engine, make_batch())[1], make_no_loss, 1.0)
    return {"gradients": gather_gradients(engine), "is_leader": engine.is_leader and engine.dp_rank == 0}


@pytest.fixture
def compare(pool_of, make_hf_model, reference, measured):
    def run(size: str, balance: float, z: float, **settings) -> None:
        settings = {"micro_batch_tokens": 10**6} | settings | parse_size(size)
        settings["megatron"] = {"moe_aux_loss_coeff": balance, "moe_z_loss_coeff": z}
        ranks = pool_of(size).run(compute_gradients, draw_address(), make_hf_model("qwen3_moe", False), settings)
        (got,) = (rank["gradients"] for rank in ranks if rank["is_leader"])
        want = reference(balance, z)
        routers = {name: gradient for name, gradient in want.items() if name.endswith("mlp.gate.weight")}
        differences = {
            "router": max(float((got[name] - gradient).norm() / gradient.norm()) for name, gradient in routers.items()),
            "gradients": max(float((got[name] - gradient).abs().max()) for name, gradient in want.items()),
        }
        measured(differences)
        assert len(routers) == 4 and differences["router"] < 1e-5 and differences["gradients"] < 1e-6, differences
        assert not any(got[name].any() for name in got.keys() - want.keys())

    return run


def test_gradients_over_padding_and_layouts(compare):
    compare("one", BALANCE, Z, layout="thd", pad_to_multiple_of=16)
    compare("one", BALANCE, Z, layout="bshd", recompute="full")


def test_the_z_loss_is_a_mean_over_the_step(compare):
    """In any number of micro-batches."""
    compare("one", 0.0, Z, micro_batch_tokens=24)


@pytest.mark.large
@pytest.mark.parametrize("size", ["TP2", "CP2", "PP2", "TP2-EP2", "TP2-ETP2", "CP2-EP2"])
def test_gradients_over_ranks_of_a_replica(compare, size):
    compare(size, BALANCE, Z, layout="thd", pad_to_multiple_of=16)
    compare(size, BALANCE, Z, layout="bshd", recompute="full")


@pytest.mark.large
@pytest.mark.parametrize("size", ["DP2", "DP2-EP2"])
def test_the_z_loss_over_replicas(compare, size):
    """Some of which have dummy micro-batches, which add nothing."""
    compare(size, 0.0, Z, micro_batch_tokens=24)
