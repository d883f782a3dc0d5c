"""The Megatron engine against HuggingFace run one sequence at a time, in fp32, over parallel sizes and layouts."""

import pytest
import torch
from engines_cases import LENGTHS, make_batch, run_case
from ranks import free_address
from support.cover import matrix
from support.factors import FAMILIES, LAYOUTS, RECOMPUTE, SIZES, TIED, TWO_RANKS, settings_of
from transformers import AutoModelForCausalLM

LIMITS = {"logits": 1e-5, "logprobs": 1e-5, "entropy": 1e-5, "gradients": 1e-6, "weights": 1e-6, "invariance": 1e-5}
"""Largest absolute differences; for invariance the largest ``|difference| / |gradient|`` (2-norms) of a tensor."""
STEPS = 3


@pytest.fixture(scope="module")
def reference(make_hf_model):
    """``reference(family, tied)``: logits, gradients, norms and weights of HuggingFace with torch's AdamW."""
    made = {}

    def run(family: str, tied: bool) -> dict:
        if (family, tied) not in made:
            model = AutoModelForCausalLM.from_pretrained(make_hf_model(family, tied), attn_implementation="eager")
            made[family, tied] = hf_steps(model.train())
        return made[family, tied]

    return run


def hf_steps(model) -> dict:
    batch = make_batch()
    denominator = batch.mask.sum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-5, weight_decay=0.0)
    result = {"norms": []}
    for step in range(STEPS):
        loss, logits = torch.zeros(()), []
        for i in range(len(batch)):
            one = batch.select(i, i + 1)
            if not one.num_tokens:
                continue
            logits.append(model(one.inputs[None]).logits[0])
            log_p = logits[-1].log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            chosen = log_p.gather(-1, one.targets[:, None])[:, 0]
            loss = loss - ((one.advantages * chosen + 0.1 * entropy) * one.mask).sum()
        optimizer.zero_grad()
        (loss / denominator).backward()
        if step == 0:
            result["logits"] = torch.cat(logits).detach()
            result["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


@pytest.fixture(scope="module")
def unsplit(one_rank, make_hf_model):
    """``unsplit(family, tied)``: the gradients of our own engine on one rank, in one bshd micro-batch."""
    made = {}

    def run(family: str, tied: bool) -> dict:
        if (family, tied) not in made:
            folder = make_hf_model(family, tied)
            (rank,) = one_rank.run(run_case, free_address(), folder, {"layout": "bshd", "micro_batch_tokens": 10**6})
            made[family, tied] = rank["gradients"]
        return made[family, tied]

    return run


@pytest.fixture
def compare(pool_of, make_hf_model, reference, unsplit, capsys):
    """``compare(size, family, tied, settings)``: run one case and check all of its numbers."""

    def run(size: str, family: str, tied: bool, settings: dict) -> None:
        settings = settings_of(size) | settings
        ranks = pool_of(size).run(run_case, free_address(), make_hf_model(family, tied), settings)
        label = f"{size} {family} tied={tied} {settings}"
        check(ranks, reference(family, tied), unsplit(family, tied), capsys, label)

    return run


def check(ranks: list[dict], want: dict, unsplit: dict, capsys, label: str) -> None:
    """Every number of a run against the reference, and its gradients against the unsplit run's, within the limits."""
    batch = make_batch()
    leaders = sorted((r for r in ranks if r["is_leader"]), key=lambda r: r["dp_rank"])
    schedule = leaders[0]["schedule"]
    logits = schedule.in_order(torch.cat([r["logits"] for r in leaders]))
    outputs = schedule.restore([r["outputs"] for r in leaders])
    log_p = want["logits"].log_softmax(-1)
    exported = next(r for r in ranks if r["weights"])
    differences = {
        "logits": largest(logits, want["logits"]),
        "logprobs": largest(outputs.logprobs, log_p.gather(-1, batch.targets[:, None])[:, 0]),
        "entropy": largest(outputs.entropy, -(log_p.exp() * log_p).sum(-1)),
        "gradients": max(largest(exported["gradients"][n], g) for n, g in want["gradients"].items()),
        "weights": max(largest(exported["weights"][n], w) for n, w in want["weights"].items()),
        "invariance": max(float((exported["gradients"][n] - g).norm() / g.norm()) for n, g in unsplit.items()),
    }
    with capsys.disabled():
        print(f"\n{label}: " + "  ".join(f"{name} {value:.1e}" for name, value in differences.items()), end="")
    over = {name: value for name, value in differences.items() if not value <= LIMITS[name]}
    assert not over, f"{label}: {over}"
    assert set(exported["weights"]) == set(want["weights"])
    assert ranks[0]["grad_norms"] == pytest.approx(want["norms"], rel=1e-5)
    step_logprobs = schedule.in_order(torch.cat([r["step_logprobs"] for r in leaders]))
    assert torch.equal(step_logprobs, outputs.logprobs), "the update's own logprobs are those of the forward pass"


def largest(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    return float((got - want).abs().max())


MICRO = {"whole": {}, "split": {"micro_batch_tokens": 16}}
"""As few micro-batches as the sizes allow, or some of a single sequence."""


@matrix(
    {
        "size": SIZES,
        "family": FAMILIES,
        "tied": TIED,
        "layout": LAYOUTS,
        "recompute": RECOMPUTE,
        "micro": tuple(MICRO),
    }
)
def test_parity(compare, size, family, tied, layout, recompute, micro):
    compare(size, family, tied == "tied", {"layout": layout, "recompute": recompute} | MICRO[micro])


@matrix({"size": TWO_RANKS, "layout": LAYOUTS, "recompute": ("none", "core", "full")})
def test_sliding_window(compare, size, layout, recompute):
    """Two pipeline micro-batches with different masks, a window on the upper layers only."""
    compare(size, "qwen2-window", False, {"layout": layout, "recompute": recompute, "micro_batch_tokens": 48})


def test_scaled_rotary(compare):
    compare("one", "llama-rope3", False, {})


def test_lengths_are_awkward():
    """The comparison covers what layouts get wrong: an empty and a one-token sequence, unequal lengths, padding at the
    end of the pack."""
    inputs = [n - 1 for n in LENGTHS]
    assert {0, 1} < set(inputs) and len(set(inputs)) == len(inputs) and inputs[-1] % 2 == 1
