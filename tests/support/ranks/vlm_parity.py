"""What the ranks of a vision-language model computed, against HuggingFace one sequence at a time."""

import torch
from support.huggingface import name_gradients, name_weights, run_forward
from support.ranks.vlm_cases import ROWS, make_vlm_batch, name_part

from engines.config import OptimizerConfig
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface, probe_loss

LIMITS = {"logits": 1e-5, "logprobs": 1e-5, "gradients": 1e-6, "weights": 1e-6}
OF_THE_LARGEST = 2e-6
"""Gradients of Gemma's embedding are multiplied by sqrt(hidden): the limit grows with the largest gradient."""


OPTIMIZER = OptimizerConfig(lr=5e-4, adam_eps=1e-5, clip_grad=0.5)
"""Of ranks that take the steps of a reference."""


def compute_vlm_reference(folder: str, images, rows=ROWS, steps: int = 0) -> dict:
    """Compute logits, logprobs, and gradients by the names in the folder, of the batch that the ranks run; and the
    weights after as many ``steps`` of ``OPTIMIZER``."""
    spec = ModelSpec.from_folder(folder)
    model, batch = load_huggingface(spec), make_vlm_batch(spec, images, rows)
    found = run_forward(model, spec, batch, probe_loss)
    (found.loss / batch.mask.sum()).backward()
    gradients = name_gradients(model, spec)
    optimizer = torch.optim.AdamW(model.parameters(), OPTIMIZER.lr, eps=OPTIMIZER.adam_eps, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        (run_forward(model, spec, batch, probe_loss).loss / batch.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
    return {
        "logits": found.logits.detach(),
        "logprobs": found.outputs.logprobs.detach(),
        "gradients": gradients,
        "weights": name_weights(model, spec) if steps else {},
        "mask": batch.mask,
    }


def check_vlm_ranks(ranks: list[dict], want: dict, measured, label: str, frozen: tuple[str, ...] = ()) -> None:
    """Compare the results of ``run_vlm_case`` with the reference, and note how far they are from it."""
    schedule = ranks[0]["schedule"]
    leaders = sorted((rank for rank in ranks if rank["is_leader"]), key=lambda rank: rank["dp_rank"])
    logits = schedule.restore_order(torch.cat([rank["logits"] for rank in leaders]))
    outputs = schedule.restore([rank["outputs"] for rank in leaders])
    mask = want["mask"]
    found = {
        "logits": float((logits - want["logits"]).abs().max()),
        "logprobs": float((outputs.logprobs - want["logprobs"])[mask].abs().max()),
    }
    differences = {}
    for rank in ranks:
        assert set(rank["gradients"]) == set(want["gradients"])
        for name, gradient in rank["gradients"].items():
            if name_part(name) in frozen:
                assert not gradient.any()
                continue
            difference = float((gradient - want["gradients"][name]).abs().max())
            differences[name] = max(differences.get(name, 0.0), difference)
    worst = max(differences, key=differences.get)
    found["gradients"] = differences[worst]
    if want["weights"]:
        (weights,) = (rank["weights"] for rank in ranks if rank["weights"])
        assert set(weights) == set(want["weights"])
        found["weights"] = max(float((weights[name] - w).abs().max()) for name, w in want["weights"].items())
    measured(found)
    largest = max(float(gradient.abs().max()) for gradient in want["gradients"].values())
    limits = LIMITS | {"gradients": max(LIMITS["gradients"], OF_THE_LARGEST * largest)}
    assert all(value <= limits[name] for name, value in found.items()), (label, found, worst)
