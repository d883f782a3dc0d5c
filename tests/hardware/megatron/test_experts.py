"""A layer of experts against a loop over tokens; what it does with padding, with idle experts and without a token."""

from types import SimpleNamespace

import pytest
import torch
from support.ranks.engines_cases import join_group, start_process
from support.ranks.pool import draw_address
from torch.utils.checkpoint import checkpoint

from hardware.megatron.mixture import Experts

HIDDEN, WIDTH, COUNT, CHOSEN, TOKENS = 16, 8, 6, 2, 11


def make_layer(rank, world, address, **changes):
    start_process(rank)
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hardware.megatron.experts import ExpertLayer

    join_group(rank, world, address)
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, activation_func=torch.nn.functional.silu, **changes
    )
    torch.manual_seed(0)
    layer = ExpertLayer(config, Experts(COUNT, CHOSEN, WIDTH, is_normed=True), ModuleSpec(MLP))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def compute_by_loop(layer, hidden, tokens):
    """Each token by itself, and each of its experts: ``[s * b, h]``, zero where there is no token."""
    outs = []
    for place, x in enumerate(hidden.flatten(0, 1)):
        if place not in tokens:
            outs.append(0 * x)
            continue
        scores = (layer.router.weight.float() @ x.float()).softmax(0)
        chosen = scores.argsort(descending=True)[:CHOSEN].tolist()
        out = 0 * x
        for expert in chosen:
            gate, up = layer.experts.weight1[expert]
            inner = torch.nn.functional.silu(gate @ x) * (up @ x)
            out = out + scores[expert] / scores[chosen].sum() * (layer.experts.weight2[expert] @ inner)
        outs.append(out)
    return torch.stack(outs)


def compare_with_loop(rank, world, address, tokens):
    """Largest differences of the output and of the gradients of input and weights."""
    layer = make_layer(rank, world, address)
    hidden, seed = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True), torch.randn(TOKENS, 1, HIDDEN)
    leaves, places = [hidden, *layer.parameters()], None if tokens is None else torch.tensor(tokens, dtype=torch.long)
    results = []
    for compute in (
        lambda: layer(hidden, padding_mask=places)[0],
        lambda: compute_by_loop(layer, hidden, range(TOKENS) if tokens is None else tokens).view_as(hidden),
    ):
        out = compute()
        gradients = torch.autograd.grad((out * seed).sum(), leaves, allow_unused=True)
        results.append(
            [out.detach(), *(x if g is None else g for g, x in zip(gradients, map(torch.zeros_like, leaves)))]
        )
    return [float((got - want).abs().max()) for got, want in zip(*results, strict=True)]


def test_outputs_and_gradients_are_those_of_a_loop(one_rank):
    """All slots with a token; some; one alone, so that most experts are idle; none."""
    for tokens in (None, [0, 2, 3, 7, 10], [4], []):
        (differences,) = one_rank.run(compare_with_loop, draw_address(), tokens)
        assert max(differences) < 1e-5, (tokens, differences)


def watch_padding(rank, world, address):
    """Rows that came to the experts, and whether any number of a slot without a token reached the output."""
    layer, tokens = make_layer(rank, world, address), torch.tensor([1, 2, 5])
    rows, hidden, outs = [], torch.randn(TOKENS, 1, HIDDEN), []
    layer.experts.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    for value in (0.0, float("nan")):
        padded = torch.full_like(hidden, value).index_copy(0, tokens, hidden[tokens])
        outs.append(layer(padded, padding_mask=tokens)[0])
    others = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, tokens, False)
    return rows, torch.equal(*outs), float(outs[1][others].abs().max())


def test_padding_reaches_no_expert(one_rank):
    rows, is_equal, largest = one_rank.run(watch_padding, draw_address())[0]
    assert rows == [3 * CHOSEN] * 2 and is_equal and largest == 0


def choose_in_bf16(rank, world, address):
    layer = make_layer(rank, world, address, params_dtype=torch.bfloat16, bf16=True)
    with torch.no_grad():
        layer.router.weight.zero_()
        # Logits of 256 + 1 and 256 + 1.5 in fp32: in bfloat16 both round to the same number.
        layer.router.weight[3, 0], layer.router.weight[3, 1] = 256, 1
        layer.router.weight[5, 0], layer.router.weight[5, 1] = 256, 1.5
        weights, numbers = layer.router(torch.ones(1, HIDDEN, dtype=torch.bfloat16))
    return weights.dtype, numbers.tolist(), weights.tolist()


def test_the_router_computes_in_fp32(one_rank):
    dtype, numbers, weights = one_rank.run(choose_in_bf16, draw_address())[0]
    assert dtype == torch.float32 and numbers == [[5, 3]]
    by_hand = 1 / (1 + torch.exp(torch.tensor(-0.5)))
    assert abs(weights[0][0] - float(by_hand)) < 1e-6


def make_router(**options):
    """A router by itself, which needs no process group."""
    from hardware.megatron.experts import Router

    torch.manual_seed(1)
    losses = dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    config = SimpleNamespace(hidden_size=HIDDEN, params_dtype=torch.float32, sequence_parallel=False, **losses)
    router = Router(config, Experts(COUNT, CHOSEN, WIDTH, is_normed=True, **options))
    torch.nn.init.normal_(router.weight)
    return router


def choose_by_loop(router, x, groups: int, open_groups: int) -> tuple[list[set[int]], list[dict[int, float]]]:
    """Token by token: the experts of its open groups, and the weight of each chosen one, before they are scaled."""
    opened, weights = [], []
    for token in x:
        scores = [float(torch.sigmoid(row @ token)) for row in router.weight]
        ranks = [score + float(bias) for score, bias in zip(scores, router.bias, strict=True)]
        members = [range(g * COUNT // groups, (g + 1) * COUNT // groups) for g in range(groups)]
        by_best = sorted(members, key=lambda own: -sum(sorted((ranks[e] for e in own), reverse=True)[:2]))
        opened.append({e for own in by_best[:open_groups] for e in own})
        chosen = sorted(opened[-1], key=lambda e: -ranks[e])[:CHOSEN]
        weights.append({e: scores[e] / sum(scores[other] for other in chosen) for e in chosen})
    return opened, weights


def choose_with_a_bias(rank, world, address):
    start_process(rank)
    router = make_router(score="sigmoid", scale=2.5, groups=3, open_groups=2, has_bias=True)
    x, found = torch.randn(40, HIDDEN), []
    for bias in (torch.zeros(COUNT), torch.linspace(-0.5, 0.5, COUNT)):
        router.bias.copy_(bias)
        with torch.no_grad():
            weights, numbers = router(x)
        chosen = [dict(zip(*row)) for row in zip(numbers.tolist(), weights.tolist(), strict=True)]
        opened, by_loop = choose_by_loop(router, x, 3, 2)
        plain = [set(((row @ router.weight.T).sigmoid() + bias).topk(CHOSEN).indices.tolist()) for row in x]
        found.append((chosen, opened, by_loop, plain))
    return found, list(router.state_dict())


def test_groups_and_a_bias_choose_and_leave_the_weights(one_rank):
    """Of three groups of two experts two are open, with and without a bias that grows with the expert's number."""
    (without, with_bias), saved = one_rank.run(choose_with_a_bias, draw_address())[0]
    for chosen, opened, by_loop, plain in (without, with_bias):
        for got, want in zip(chosen, by_loop, strict=True):
            assert got == pytest.approx({expert: 2.5 * weight for expert, weight in want.items()}, abs=1e-6)
        assert all(set(got) <= own for got, own in zip(chosen, opened, strict=True))
        assert any(set(got) != best for got, best in zip(chosen, plain, strict=True)), "groups close some experts"
    moved = [set(a) != set(b) for a, b in zip(without[0], with_bias[0], strict=True)]
    assert any(moved) and not all(moved)
    assert saved == ["weight", "bias"]


def move_by_hand(rank, world, address):
    from hardware.megatron.experts import Routers

    make_layer(rank, world, address)  # groups of ranks
    routers = [make_router(), *(make_router(has_bias=True) for _ in range(2))]
    for router, counts in zip(routers, ([9] * 6, [4, 4, 4, 4, 4, 4], [0, 1, 2, 2, 3, 4]), strict=True):
        router.load = torch.tensor(counts)
    Routers(torch.nn.ModuleList(routers), None, torch.device("cpu")).move_biases(0.25)
    return [None if router.bias is None else router.bias.tolist() for router in routers]


def test_a_bias_moves_towards_the_mean_load(one_rank):
    none, balanced, apart = one_rank.run(move_by_hand, draw_address())[0]
    assert none is None and balanced == [0] * 6
    assert apart == [0.25, 0.25, 0, 0, -0.25, -0.25]


def count_by_loop(router, x) -> list[int]:
    counts = [0] * COUNT
    for token in x:
        for expert in (router.weight @ token).argsort(descending=True)[:CHOSEN].tolist():
            counts[expert] += 1
    return counts


def count_by_router(rank, world, address):
    """Counts of a forward pass without gradients, and of two micro-batches, the second recomputed; by a loop too."""
    start_process(rank)
    router = make_router()
    first, second = torch.randn(7, HIDDEN), torch.randn(4, HIDDEN)
    with torch.no_grad():
        router(first)
    idle = router.load.tolist()
    router(first)
    weights, _ = checkpoint(router, second.requires_grad_(), use_reentrant=True)
    weights.sum().backward()
    router(first[:0])
    return idle, router.load.tolist(), count_by_loop(router, torch.cat([first, second])), list(router.state_dict())


def test_load_counts_each_token_that_learns_once(one_rank):
    idle, counted, by_loop, saved = one_rank.run(count_by_router, draw_address())[0]
    assert idle == [0] * COUNT and counted == by_loop and sum(counted) == (7 + 4) * CHOSEN
    assert saved == ["weight"], "counts do not go into checkpoints"


def measure_loads(rank, world, address):
    from hardware.megatron.experts import Routers

    layer, routers = make_layer(rank, world, address), [make_router(), make_router()]
    hidden, tokens = torch.randn(TOKENS, 1, HIDDEN), torch.tensor([1, 2, 5])
    layer(hidden, padding_mask=tokens)
    found = layer.router.load.tolist(), count_by_loop(layer.router, hidden.flatten(0, 1)[tokens])
    for router, counts in zip(routers, ([4, 4, 4, 4, 4, 4], [0, 1, 1, 1, 3, 6]), strict=True):
        router.load = torch.tensor(counts)
    losses = SimpleNamespace(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    stages = [torch.nn.ModuleList(some) for some in (routers[:1], routers)]
    return found, [Routers(stage, losses, torch.device("cpu")).measure() for stage in stages]


def test_load_is_by_the_mean_of_a_layer(one_rank):
    (counted, by_loop), loads = one_rank.run(measure_loads, draw_address())[0]
    assert counted == by_loop and sum(counted) == 3 * CHOSEN, "padding is counted"
    assert loads == [{"expert_load_min": a, "expert_load_max": b} for a, b in ((1, 1), (0, 3))]
